"""A state that is worth keeping is left behind in passing: no second step over the prompt, the same tokens."""

from collections.abc import Iterator

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Worker, request
from tests.models.tiny import prompt
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
    """The first is left behind, the chunk ends at the second; the third sibling resumes at the junction."""
    shared = prompt(6, 200)
    worker.local([*shared, *prompt(60, 150)], max_tokens=NEW)
    second = [*shared, *prompt(61, 150)]
    assert steps_of(worker, second, oracle) == (2, 0)
    assert steps_of(worker, [*shared, *prompt(62, 150)], oracle)[1] == 192
    assert steps_of(worker, [*second[:340], *prompt(63, 10)], oracle)[1] == 320


def test_without_a_slot_the_prompt_still_takes_one_step(model: HybridModel, oracle: Oracle) -> None:
    budget = model.layout.slot_bytes + 8 * model.layout.block_bytes + 256
    worker = Worker(model, "w", LoopbackNetwork(), max_running=1, checkpoint_slots=0, cache_bytes=budget)
    assert steps_of(worker, prompt(1, 200), oracle) == (1, 0)
    assert worker.quiet()
    worker.close()


def test_cancelled_in_flight_gives_the_slot_back(model: HybridModel) -> None:
    worker = Worker(model, "w", LoopbackNetwork(), steps_in_flight=2)
    worker.turn(base.Submit(request("r", prompt(1, 200), worker.root, max_tokens=9), Mode.LOCAL))
    holding = worker.engine.sequences["r"].holding
    assert holding is not None and holding.snapshot_slot is not None
    worker.turn(base.Cancel("r"))
    assert holding.snapshot_slot is None
    assert worker.quiet()
    worker.close()
