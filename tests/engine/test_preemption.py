"""Requests get memory as they go; who runs out makes the youngest yield, and nobody loses or changes a token."""

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair, Worker, request
from tests.models.tiny import prompt
from twinflow.engine import base
from twinflow.engine.base import Mode
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork


def tight(model: HybridModel, blocks: int, slots: int = 6, **config: int) -> Worker:
    layout = model.layout
    budget = slots * layout.slot_bytes + blocks * layout.block_bytes + 256
    values = {"max_running": slots - 1, "checkpoint_slots": 1, "cache_bytes": budget, "growth_tokens": 64, **config}
    return Worker(model, "tight", LoopbackNetwork(), **values)


def preempted(worker: Worker, requests: list) -> tuple[dict, int]:
    """Results, and how often anybody had to yield."""
    seen: dict[str, int] = {}
    inner = worker.engine._preempt

    def count(sequence) -> None:
        seen[sequence.id] = seen.get(sequence.id, 0) + 1
        inner(sequence)

    worker.engine._preempt = count  # type: ignore[method-assign]
    return worker.run(requests), sum(seen.values())


@pytest.mark.parametrize("blocks", [6, 7, 9])
def test_tokens_are_those_of_an_undisturbed_run(model: HybridModel, oracle: Oracle, blocks: int) -> None:
    worker = tight(model, blocks)
    prompts = [prompt(i, 70 + 10 * i) for i in range(4)]
    new = 190
    results, times = preempted(
        worker, [request(f"r{i}", p, worker.root, max_tokens=new) for i, p in enumerate(prompts)]
    )
    assert times > 0, "the pool is too large to show anything"
    for i, p in enumerate(prompts):
        assert results[f"r{i}"].error == ""
        assert results[f"r{i}"].tokens == oracle(p, new), i
    assert worker.quiet()
    worker.close()


def test_who_yields_resumes_at_its_published_state(model: HybridModel, oracle: Oracle) -> None:
    """Where nothing has to go for the others, coming back computes one token anew, not prompt and reply."""
    worker = tight(model, 12)
    asked, new = prompt(5, 100), 90
    tokens, done, yielded_at = [], False, None
    notices = worker.turn(base.Submit(request("r", asked, worker.root, max_tokens=new), Mode.LOCAL))
    while not done:
        for notice in notices:
            tokens += [s.token_id for s in notice.samples] if isinstance(notice, base.Generated) else []
            done |= isinstance(notice, base.Done)
        if yielded_at is None and len(tokens) >= 40:
            yielded_at = len(tokens)
            worker.engine._preempt(worker.engine.running["r"])
            assert not worker.engine.running
        notices = worker.turn()
    assert (yielded_at, tokens) == (40, oracle(asked, new))
    assert worker.engine.runner.work.prefill_tokens <= len(asked) + 1
    assert worker.quiet()
    worker.close()


def test_a_request_near_the_ceiling_runs_alone_to_its_end(model: HybridModel, oracle: Oracle) -> None:
    worker = tight(model, 6)
    big, small = prompt(1, 130), prompt(2, 60)
    requests = [
        request("small", small, worker.root, max_tokens=180),
        request("big", big, worker.root, max_tokens=64 * 6 - 130),
    ]
    results, times = preempted(worker, requests)
    assert results["big"].tokens == oracle(big, 64 * 6 - 130)
    assert results["small"].tokens == oracle(small, 180)
    assert 0 < times < 20
    worker.close()


def test_memory_is_taken_as_it_is_needed(model: HybridModel) -> None:
    """A large max_tokens costs nothing until it is used."""
    worker = tight(model, 12, growth_tokens=64)
    worker.turn(base.Submit(request("r", prompt(1, 60), worker.root, max_tokens=600), Mode.LOCAL))
    held = worker.engine.cache.counts()["attention"].held
    assert held == 2
    worker.turn(base.Cancel("r"))
    worker.close()


def test_a_preempted_remote_request_goes_on_here(model: HybridModel, oracle: Oracle) -> None:
    layout = model.layout
    budget = 6 * layout.slot_bytes + 7 * layout.block_bytes + 256
    pair = Pair.build(model, max_running=4, checkpoint_slots=2, cache_bytes=budget, growth_tokens=64)
    prompts = [prompt(i, 80) for i in range(3)]
    ids = [pair.submit(p, max_tokens=150) for p in prompts]
    pair.drive()
    assert [pair.results[i].error for i in ids] == ["", "", ""]
    assert [pair.results[i].tokens for i in ids] == [oracle(p, 150) for p in prompts]
    assert pair.quiet()
    pair.close()
