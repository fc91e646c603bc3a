"""Invariants 1 and 4 on a random checkpoint: the same greedy tokens whoever computes them, whatever is cached.

Lengths sit around block and chunk boundaries; every comparison is with `transformers` run on the prompt alone.
"""

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair, request
from tests.models.tiny import prompt
from twinflow.models.base import HybridModel

LENGTHS = (1, 2, 3, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 320, 333)
NEW = 10


@pytest.mark.parametrize("tokens", LENGTHS)
def test_cold_and_warm_everywhere(pair: Pair, oracle: Oracle, tokens: int) -> None:
    p = prompt(tokens, tokens)
    want = oracle(p, NEW)
    runs = {
        "prefill + decode, cold": lambda: pair.remote(p, max_tokens=NEW),
        "both warm": lambda: pair.remote(p, max_tokens=NEW),
        "prefill warm": lambda: (pair.decode.flush(), pair.remote(p, max_tokens=NEW))[1],
        "decode warm": lambda: (pair.prefill.flush(), pair.remote(p, max_tokens=NEW))[1],
        "aggregated, warm": lambda: pair.decode.local(p, max_tokens=NEW),
        "aggregated, cold": lambda: (pair.decode.flush(), pair.decode.local(p, max_tokens=NEW))[1],
    }
    for name, run in runs.items():
        result = run()
        assert (name, result.error, result.tokens) == (name, "", want)
        assert pair.quiet()


def test_conversation_resumes_at_the_end_of_the_reply(pair: Pair, oracle: Oracle) -> None:
    """Four turns; from the second on the decode worker resumes where the last reply ended, without any hand-off."""
    talk, previous = prompt(1, 150), 0
    for turn in range(4):
        first = pair.remote(talk, max_tokens=NEW) if turn == 0 else pair.decode.local(talk, max_tokens=NEW)
        assert first.tokens == oracle(talk, NEW)
        assert first.stats.decode_resumed_tokens == previous
        previous = len(talk) + NEW - 1  # the last token of a reply was never fed
        talk = talk + first.tokens + prompt(100 + turn, 30)


def test_siblings_of_a_shared_prefix(pair: Pair, oracle: Oracle) -> None:
    shared = prompt(5, 200)
    for i in range(4):
        p = shared + prompt(50 + i, 20 + i)
        assert pair.remote(p, max_tokens=NEW).tokens == oracle(p, NEW)
    assert pair.quiet()


def test_many_at_once_do_not_mix(pair: Pair, oracle: Oracle) -> None:
    prompts = [prompt(i, n) for i, n in enumerate((5, 64, 130, 65, 1, 200, 64, 90, 31, 129))]
    ids = [pair.submit(p, max_tokens=NEW) for p in prompts]
    pair.drive()
    assert [pair.results[i].tokens for i in ids] == [oracle(p, NEW) for p in prompts]
    root = pair.decode.root
    out = pair.decode.run([request(f"l{i}", p, root, max_tokens=NEW) for i, p in enumerate(prompts)])
    assert [out[f"l{i}"].tokens for i in range(len(prompts))] == [oracle(p, NEW) for p in prompts]


@pytest.mark.parametrize("chunk", [1, 17, 63, 64, 65, 100])
def test_chunk_size_changes_no_token(model: HybridModel, oracle: Oracle, chunk: int) -> None:
    pair = Pair.build(model, chunk_tokens=chunk, step_tokens=chunk + 3)
    p = prompt(9, 140)
    assert pair.remote(p, max_tokens=NEW).tokens == oracle(p, NEW)
    assert pair.decode.local(p[:70], max_tokens=NEW).tokens == oracle(p[:70], NEW)
    pair.close()


def test_tiny_cache_evicts_and_stays_right(model: HybridModel, oracle: Oracle) -> None:
    """Room for one long request: everything else has to go each time."""
    layout = model.layout
    budget = 3 * layout.slot_bytes + 6 * layout.block_bytes
    pair = Pair.build(model, max_running=2, checkpoint_slots=1, cache_bytes=budget)
    for i, n in enumerate((300, 65, 200, 130, 300, 64, 250)):
        p = prompt(i % 3, n)
        assert pair.remote(p, max_tokens=NEW).tokens == oracle(p, NEW), n
        assert pair.quiet()
    pair.close()


def test_forced_tokens_continue_an_answer(pair: Pair, oracle: Oracle) -> None:
    """A recovery: what was already sent is a prefix, never sampled again, and counts against max_tokens."""
    p = prompt(2, 70)
    want = oracle(p, NEW)
    assert pair.decode.local(p, forced=want[:4], max_tokens=NEW).tokens == want[4:]


def test_sampled_tokens_do_not_depend_on_the_route(pair: Pair) -> None:
    p = prompt(3, 150)
    params = {"max_tokens": NEW, "temperature": 1.0, "seed": 7}
    want = pair.decode.local(p, **params).tokens
    pair.decode.flush()
    for _ in range(2):
        assert pair.remote(p, **params).tokens == want
    assert pair.decode.local(p, **{**params, "seed": 8}).tokens != want
