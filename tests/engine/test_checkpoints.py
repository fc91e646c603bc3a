"""What the engine keeps in passing, on a random checkpoint: junctions, intervals, the received state; tokens stay the same."""

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair
from tests.models.tiny import prompt
from twinflow.models.base import HybridModel

NEW = 6


def test_the_third_sibling_resumes_at_the_junction(model: HybridModel, oracle: Oracle) -> None:
    """Two prompts share 500 tokens, then differ: the second one, which computes them again, leaves a state for the third."""
    pair = Pair.build(model, checkpoint_interval_tokens=4096)
    shared = prompt(5, 500)
    prompts = [shared + prompt(50 + i, 40 + i) for i in range(3)]
    results = [pair.decode.local(p, max_tokens=NEW) for p in prompts]
    assert [r.stats.decode_resumed_tokens for r in results] == [0, 0, 448]
    assert [r.tokens for r in results] == [oracle(p, NEW) for p in prompts]
    assert pair.quiet()
    pair.close()


def test_the_third_sibling_resumes_at_the_junction_of_the_prefill_worker(model: HybridModel, oracle: Oracle) -> None:
    pair = Pair.build(model, checkpoint_interval_tokens=4096)
    shared = prompt(5, 500)
    for i, resumed in enumerate((0, 0, 448)):
        p = shared + prompt(50 + i, 40 + i)
        result = pair.remote(p, max_tokens=NEW)
        assert (result.tokens, result.stats.prefill_resumed_tokens) == (oracle(p, NEW), resumed)
    pair.close()


def test_intervals_serve_the_second_sibling(model: HybridModel, oracle: Oracle) -> None:
    pair = Pair.build(model, checkpoint_interval_tokens=128, chunk_tokens=100)
    shared = prompt(6, 420)
    pair.decode.local(shared + prompt(1, 50), max_tokens=NEW)
    p = shared + prompt(2, 50)
    result = pair.decode.local(p, max_tokens=NEW)
    assert result.stats.decode_resumed_tokens == 384
    assert result.tokens == oracle(p, NEW)
    pair.close()


def test_decode_resumes_at_the_received_state_when_the_reply_is_rewritten(pair: Pair, oracle: Oracle) -> None:
    """A template that drops part of the reply: the end of the reply is no prefix of the next turn, the prompt's end is."""
    first = prompt(7, 150)
    pair.remote(first, max_tokens=NEW)
    p = first + prompt(8, 30)
    result = pair.decode.local(p, max_tokens=NEW)
    assert (result.stats.decode_resumed_tokens, result.tokens) == (150, oracle(p, NEW))
    assert pair.quiet()


def test_the_received_state_is_kept_only_where_there_is_room(model: HybridModel, oracle: Oracle) -> None:
    """One slot beside the blocks that the prompt needs: best effort, the hand-off goes through."""
    layout = model.layout
    pair = Pair.build(
        model, max_running=1, checkpoint_slots=0, cache_bytes=layout.slot_bytes + 6 * layout.block_bytes + 512
    )
    for n in (150, 300):
        assert pair.remote(prompt(n, n), max_tokens=NEW).tokens == oracle(prompt(n, n), NEW)
        assert pair.quiet()
    pair.close()
