"""States that are kept while generating, and KV that is there already: what a later turn saves by them, and the same tokens."""

from typing import Any

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair, Worker, request
from tests.models.tiny import prompt
from twinflow.contracts.hashing import TokenChain, pack_tokens
from twinflow.engine import base
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork

NEW = 6


@pytest.mark.parametrize(("kept", "resumed"), [(100, 128), (70, 128), (60, 64), (150, 192)])
def test_a_turn_that_keeps_a_part_of_a_long_reply_resumes_inside_it(
    model: HybridModel, oracle: Oracle, kept: int, resumed: int
) -> None:
    pair = Pair.build(model, checkpoint_interval_tokens=64, checkpoint_slots=12)
    talk = prompt(11, 60)
    reply = pair.decode.local(talk, max_tokens=180).tokens
    assert reply == oracle(talk, 180)
    rewritten = talk + reply[:kept] + prompt(12, 20)
    got = pair.decode.local(rewritten, max_tokens=NEW)
    assert (got.stats.decode_resumed_tokens, got.tokens) == (resumed, oracle(rewritten, NEW))
    assert pair.quiet()
    pair.close()


def test_states_kept_while_generating_are_those_of_their_positions_in_mixed_steps(
    model: HybridModel, oracle: Oracle
) -> None:
    """Several sequences pass their cuts in steps that they share with each other's prefill chunks."""
    worker = Worker(
        model, "one", LoopbackNetwork(), checkpoint_interval_tokens=64, checkpoint_slots=16, chunk_tokens=48,
        cache_bytes=30 * model.layout.slot_bytes + 80 * model.layout.block_bytes,
    )  # fmt: skip
    prompts = [prompt(20 + i, 50 + 37 * i) for i in range(3)]
    replies = worker.run([request(f"r{i}", p, worker.root, max_tokens=100) for i, p in enumerate(prompts)])
    for i, p in enumerate(prompts):
        full = p + replies[f"r{i}"].tokens
        at = (len(full) - 10) // 64 * 64
        rewritten = full[: at + 5] + prompt(40 + i, 20)
        got = worker.local(rewritten, max_tokens=NEW)
        assert (got.stats.decode_resumed_tokens, got.tokens) == (at, oracle(rewritten, NEW))
    worker.close()


def test_recomputed_positions_below_the_reach_write_no_kv(pair: Pair, oracle: Oracle) -> None:
    """The states of a prompt are gone, its KV is not: everything is computed again, nothing below the reach is written."""
    worker, shared = pair.decode, prompt(13, 200)
    worker.local(shared, max_tokens=NEW)
    worker.turn(base.Flush(group="state"))
    longer = shared + prompt(14, 40)
    reach = worker.engine.cache.match(chain_of(worker, longer)).attention_tokens
    assert reach == 200
    model, written = worker.engine.runner.model, []

    class Records:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def forward(self, batch: Any, *rest: Any) -> Any:
            real = batch.kv_slots >= 0
            written.extend(batch.positions[real].tolist())
            return model.forward(batch, *rest)

    worker.engine.runner.model = Records()  # type: ignore[assignment]
    got = worker.local(longer, max_tokens=NEW)
    assert (got.stats.decode_resumed_tokens, got.tokens) == (0, oracle(longer, NEW))
    assert sorted(written) == list(range(reach, len(longer) + NEW - 1))


def chain_of(worker: Worker, tokens: list[int]) -> TokenChain:
    return TokenChain(worker.root, worker.engine.model.layout.block_tokens, pack_tokens(tokens))
