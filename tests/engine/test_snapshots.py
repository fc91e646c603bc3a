"""States that are worth keeping are left behind in passing: no step more over the prompt for them, the same tokens."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Worker, request
from tests.models.tiny import prompt
from twinflow.contracts.events import EventKind
from twinflow.engine import base
from twinflow.engine.base import Mode
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork

NEW = 6


@pytest.fixture(params=[1, 2], ids=["one step at a time", "two in flight"])
def worker(request: pytest.FixtureRequest, model: HybridModel) -> Iterator[Worker]:
    worker = Worker(model, "w", LoopbackNetwork(), steps_in_flight=request.param, checkpoint_slots=14)
    yield worker
    assert worker.quiet()
    worker.close()


def steps_of(worker: Worker, tokens: list[int], oracle: Oracle) -> tuple[int, int]:
    """Steps that a request took beyond those of its reply's tokens but the first, and where it resumed."""
    before = worker.engine.runner.work.steps
    result = worker.local(tokens, max_tokens=NEW)
    worker.turn()
    assert result.tokens == oracle(tokens, NEW)
    return worker.engine.runner.work.steps - before - (NEW - 1), result.stats.decode_resumed_tokens


@pytest.mark.parametrize("length", [66, 129, 320, 333])
def test_a_prompt_takes_one_step_and_leaves_its_boundary_state(worker: Worker, oracle: Oracle, length: int) -> None:
    p = prompt(length, length)
    assert steps_of(worker, p, oracle) == (1, 0)
    boundary = (length - 1) // 64 * 64
    assert steps_of(worker, [*p[:boundary], *prompt(7, 30)], oracle) == (1, boundary)


def test_one_that_resumes_amid_a_block_ends_a_chunk_at_the_boundary(worker: Worker, oracle: Oracle) -> None:
    """The state kernels leave states behind at multiples of 64 from where they start, which are no block boundaries here."""
    talk = prompt(3, 100)
    talk = [*talk, *worker.local(talk, max_tokens=NEW).tokens, *prompt(4, 90)]
    steps, resumed = steps_of(worker, talk, oracle)
    assert steps == 2
    assert resumed % 64
    assert steps_of(worker, [*talk[:192], *prompt(5, 9)], oracle)[1] == 192


def test_junction_and_boundary_in_one_chunk(worker: Worker, oracle: Oracle) -> None:
    """Both are left behind; the third sibling resumes at the junction."""
    shared = prompt(6, 200)
    worker.local([*shared, *prompt(60, 150)], max_tokens=NEW)
    second = [*shared, *prompt(61, 150)]
    assert steps_of(worker, second, oracle) == (1, 0)
    assert steps_of(worker, [*shared, *prompt(62, 150)], oracle)[1] == 192
    assert steps_of(worker, [*second[:340], *prompt(63, 10)], oracle)[1] == 320


@pytest.mark.parametrize(("chunk_tokens", "steps"), [(512, 1), (256, 2), (192, 3), (150, 4)])
@pytest.mark.parametrize("flights", [1, 2], ids=["one step at a time", "two in flight"])
def test_a_step_leaves_as_many_states_as_it_comes_by(
    model: HybridModel, oracle: Oracle, flights: int, chunk_tokens: int, steps: int
) -> None:
    """At all intervals and at the boundary, amid chunks and at their ends; each is resumed from."""
    config: dict[str, Any] = {"checkpoint_interval_tokens": 64, "checkpoint_slots": 16, "chunk_tokens": chunk_tokens}
    worker = Worker(model, "w", LoopbackNetwork(), steps_in_flight=flights, **config)
    p = prompt(9, 500)
    assert steps_of(worker, p, oracle) == (steps, 0)
    for at in (448, 384, 320, 256, 192, 128, 64):
        q = [*p[: at + 7], *prompt(at, 30)]
        assert steps_of(worker, q, oracle)[1] == at
    assert worker.quiet()
    worker.close()


def test_beside_a_stream_a_prompt_takes_the_steps_of_its_tokens(model: HybridModel, oracle: Oracle) -> None:
    """What the stream takes of a step's budget does not put the prompt's chunks out of step with its cuts."""
    worker = Worker(
        model,
        "w",
        LoopbackNetwork(),
        step_tokens=256,
        chunk_tokens=256,
        checkpoint_interval_tokens=128,
        checkpoint_slots=16,
    )
    worker.turn(base.Submit(request("stream", prompt(1, 20), worker.root, max_tokens=60), Mode.LOCAL))
    p = prompt(2, 570)
    before = worker.engine.runner.work.steps
    worker.turn(base.Submit(request("r", p, worker.root, max_tokens=NEW), Mode.LOCAL))
    turns = 1
    while not worker.engine.sequences["r"].generated:
        worker.turn()
        turns += 1
    assert worker.engine.runner.work.steps - before == turns == 3  # 192 + 192 + 186 tokens
    while worker.engine.sequences:
        worker.turn()
    for at in (512, 384, 256):
        assert steps_of(worker, [*p[: at + 3], *prompt(at, 9)], oracle)[1] == at
    worker.close()


def test_the_boundary_comes_before_intervals_where_slots_are_few(model: HybridModel) -> None:
    budget = 4 * model.layout.slot_bytes + 10 * model.layout.block_bytes + 256
    config: dict[str, Any] = {"max_running": 1, "checkpoint_slots": 3, "cache_bytes": budget}
    worker = Worker(model, "w", LoopbackNetwork(), checkpoint_interval_tokens=64, growth_tokens=1, **config)
    p = prompt(10, 500)
    worker.turn(base.Submit(request("r", p, worker.root, max_tokens=NEW), Mode.LOCAL))
    found = [e.position for e in worker.engine.cache.snapshot()[1] if e.kind == EventKind.CHECKPOINT_STORED]
    assert sorted(found) == [256, 320, 384, 448]  # of seven; the room for one more than three was spare blocks
    worker.turn(base.Cancel("r"))
    assert worker.quiet()
    worker.close()


@pytest.mark.parametrize("chunk_tokens", [512, 128])
def test_a_wanted_state_is_kept_besides(model: HybridModel, oracle: Oracle, chunk_tokens: int) -> None:
    """Two steps in flight: one lands while the next, which leaves the wanted state behind, is still on its way."""
    config: dict[str, Any] = {"checkpoint_interval_tokens": 4096, "checkpoint_slots": 16, "chunk_tokens": chunk_tokens}
    worker = Worker(model, "w", LoopbackNetwork(), steps_in_flight=2, **config)
    p = prompt(11, 500)
    worker.turn(base.Submit(request("r", p, worker.root), Mode.OFFER, 0, 192))
    ready = [n for _ in range(9) for n in worker.turn() if isinstance(n, base.Prefilled)]
    assert len(ready) == 1 and ready[0].checkpoint is not None
    assert ready[0].checkpoint.tag.position == 192
    worker.turn(base.EndLease("r"))
    assert steps_of(worker, [*p[:210], *prompt(3, 30)], oracle)[1] == 192
    assert steps_of(worker, [*p[:460], *prompt(4, 30)], oracle)[1] == 448
    assert worker.quiet()
    worker.close()


def test_without_a_slot_the_prompt_still_takes_one_step(model: HybridModel, oracle: Oracle) -> None:
    budget = model.layout.slot_bytes + 8 * model.layout.block_bytes + 256
    worker = Worker(model, "w", LoopbackNetwork(), max_running=1, checkpoint_slots=0, cache_bytes=budget)
    assert steps_of(worker, prompt(1, 200), oracle) == (1, 0)
    assert worker.quiet()
    worker.close()


@pytest.mark.parametrize("chunk_tokens", [512, 128])
def test_cancelled_in_flight_gives_the_slots_back(model: HybridModel, chunk_tokens: int) -> None:
    worker = Worker(
        model, "w", LoopbackNetwork(), steps_in_flight=2, checkpoint_interval_tokens=64, chunk_tokens=chunk_tokens
    )
    worker.turn(base.Submit(request("r", prompt(1, 400), worker.root, max_tokens=9), Mode.LOCAL))
    worker.turn()
    holding = worker.engine.sequences["r"].holding
    assert holding is not None and list(holding.snapshots) == ([192, 256] if chunk_tokens == 128 else [])
    worker.turn(base.Cancel("r"))
    assert not holding.snapshots
    assert worker.quiet()
    worker.close()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_failing_step_gives_its_slots_back(model: HybridModel, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Also where the step before it, with states of its own, is still in flight."""
    worker = Worker(model, "w", LoopbackNetwork(), steps_in_flight=2, checkpoint_interval_tokens=64, chunk_tokens=128)
    real, calls = worker.engine.runner.model, iter(range(1000))

    class Breaks:
        def forward(self, *args: object) -> object:
            if next(calls) == at:
                raise RuntimeError("device fault")
            return real.forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(worker.engine.runner, "model", Breaks())
    assert "device fault" in worker.local(prompt(1, 400), max_tokens=NEW).error
    assert worker.quiet()
    worker.close()
