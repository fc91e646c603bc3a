"""Who gets memory when, and how much of it: in order of arrival, what the role needs, one slot per running request."""

import math

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Result, Worker, collect, request
from tests.engine.test_capacity import GIB, shape
from tests.models.tiny import prompt
from twinflow.contracts.workers import Role
from twinflow.engine import base
from twinflow.engine.base import Mode
from twinflow.engine.capacity import Ask, plan_capacity
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork

BLOCK = 64


def tight(model: HybridModel, blocks: int, slots: int, **config: int) -> Worker:
    budget = slots * model.layout.slot_bytes + blocks * model.layout.block_bytes + 256
    values = {"max_running": slots - 1, "checkpoint_slots": 1, "cache_bytes": budget, "growth_tokens": 64, **config}
    return Worker(model, "tight", LoopbackNetwork(), **values)


def test_who_does_not_fit_waits_and_nobody_overtakes(model: HybridModel, oracle: Oracle) -> None:
    """The second request needs more than is left, the third would fit: it waits behind the second."""
    worker, order = tight(model, blocks=6, slots=5), []
    prompts = {"first": prompt(1, 3 * BLOCK), "large": prompt(2, 4 * BLOCK), "small": prompt(3, 20)}
    results = {name: Result() for name in prompts}
    notices = worker.turn(
        *(base.Submit(request(n, p, worker.root, max_tokens=10), Mode.LOCAL) for n, p in prompts.items())
    )
    ended: list[str] = []
    for _ in range(1000):
        for notice in notices:
            collect(results, notice)
            if isinstance(notice, base.Generated) and notice.id not in order:
                order.append(notice.id)
            if isinstance(notice, base.Done):
                ended.append(notice.id)
        if len(ended) == 3:
            break
        notices = worker.turn()
    assert order == ["first", "large", "small"]
    assert {n: r.tokens for n, r in results.items()} == {n: oracle(p, 10) for n, p in prompts.items()}
    assert worker.quiet()
    worker.close()


def test_what_can_never_fit_is_refused_at_once_and_holds_nobody_up(model: HybridModel, oracle: Oracle) -> None:
    worker, p = tight(model, blocks=6, slots=5), prompt(4, 50)
    huge = request("huge", prompt(5, 100), worker.root, max_tokens=6 * BLOCK)
    results = worker.run([huge, request("next", p, worker.root, max_tokens=5)])
    assert results["huge"].error == (
        "100 prompt tokens + max_tokens 384 exceed this worker's cache of 384 tokens: they need 8 blocks of 64 tokens and 1 "
        "state slot, it has 6 blocks"
    )
    assert results["next"].tokens == oracle(p, 5)
    worker.close()


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_as_many_run_at_once_as_there_are_slots_each_with_one(model: HybridModel, slots: int) -> None:
    worker = tight(model, blocks=40, slots=slots + 1, max_running=slots)
    for i in range(slots + 2):
        worker.turn(base.Submit(request(f"r{i}", prompt(i, 30), worker.root, max_tokens=50), Mode.LOCAL))
    assert worker.engine.cache.counts()["state"].held == slots
    worker.turn(*(base.Cancel(f"r{i}") for i in range(slots + 2)))
    assert worker.quiet()
    worker.close()


@pytest.mark.parametrize("mode", [Mode.OFFER, Mode.LOCAL], ids=["prefill", "decode"])
def test_a_prefill_worker_holds_nothing_for_the_reply(model: HybridModel, mode: Mode) -> None:
    worker, tokens = tight(model, blocks=40, slots=4, growth_tokens=640), 100
    worker.turn(base.Submit(request("r", prompt(6, tokens), worker.root, max_tokens=1000), mode))
    for _ in range(6):
        worker.turn()
    counts = worker.engine.cache.counts()
    expected = math.ceil(tokens / BLOCK) if mode is Mode.OFFER else math.ceil((tokens + 640) / BLOCK)
    assert (counts["attention"].held, counts["state"].held) == (expected, 1)
    worker.turn(base.Cancel("r"))
    assert worker.quiet()
    worker.close()


@pytest.mark.parametrize("role", list(Role), ids=lambda r: r.value)
def test_no_role_plans_slots_beside_running_requests_and_checkpoints(role: Role) -> None:
    """None for decoding on a prefill worker, none for prefill chunks on a decode worker, none for speculation on either."""
    for checkpoints in (0, 16):
        ask = Ask(role=role, max_running=32, checkpoint_slots=checkpoints, device_bytes=24 * GIB)
        planned = plan_capacity(shape("qwen3.5-4b"), ask)
        assert planned.geometry.slot_floor == 32 + checkpoints
