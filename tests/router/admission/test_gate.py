"""The gate under asyncio: who waits, who goes, and that nothing stays behind whatever ends a request."""

import asyncio
import dataclasses
import itertools
import pickle
import random
import time

import pytest

from services.router.admission.base import Ask, Gate, KeyFacts, Permit, Refusal, Shed, ShedReason, WaitedTooLong
from services.router.admission.gate import POLL_S, GateEvents, GateSettings, LocalGate
from services.router.admission.queue import QUANTUM_TOKENS
from services.router.admission.room import Ahead, Room
from twinflow.contracts.errors import TooLong

A, B = KeyFacts("a"), KeyFacts("b")


class Workers:
    """So many requests have room; what was placed stays until `finish`."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.placed = 0
        self.nobody = False
        self.looks = 0

    def look(self, ahead: Ahead) -> Room:
        self.looks += 1
        if self.nobody:
            return Room.NOBODY
        return Room.FREE if self.placed + ahead.generations < self.room else Room.FULL


class Rig:
    def __init__(self, room: int = 1, fits=lambda ask: None, **settings: object) -> None:
        self.workers = Workers(room)
        self.waited: list[float] = []
        self.shed: list[tuple[str, ShedReason]] = []
        self.left: list[tuple[str, int]] = []
        events = GateEvents(
            self.waited.append, lambda *told: self.shed.append(told), lambda *told: self.left.append(told)
        )
        self.gate = LocalGate(GateSettings(**settings), self.workers.look, fits, time.monotonic, events)

    def place(self, permit: Permit) -> None:
        self.workers.placed += 1
        self.gate.placed(permit.id)

    def finish(self, permit: Permit, tokens: int = 0) -> None:
        self.workers.placed -= 1
        self.gate.leave(permit.id, tokens)

    async def queued(self, ask: Ask) -> asyncio.Task[Permit]:
        waiting = self.gate.waiting
        task = asyncio.create_task(self.gate.enter(ask))
        await asyncio.sleep(0)
        assert self.gate.waiting == waiting + 1 and not task.done()
        return task

    async def admit(self, ask: Ask) -> Permit:
        permit = await self.gate.enter(ask)
        self.place(permit)
        return permit

    def quiet(self) -> bool:
        gate = self.gate
        return (gate.waiting, gate.held, gate._through, gate._ahead) == (0, 0, 0, Ahead()) and all(
            state.active == 0 for state in gate._keys.values()
        )


async def soon(task: asyncio.Task[Permit]) -> Permit:
    async with asyncio.timeout(5):
        return await task


async def test_with_room_a_request_passes_without_yielding():
    rig = Rig(room=2)
    gate: Gate = rig.gate
    assert gate.idle
    entering = gate.enter(Ask(A, 10, 10))
    with pytest.raises(StopIteration) as passed:  # the whole entry is one step: nothing was awaited
        entering.send(None)
    permit = passed.value.value
    assert isinstance(permit, Permit) and rig.gate.held == 1
    gate.leave(permit.id, 5)
    assert rig.quiet() and rig.left == [("a", 5)] and len(rig.waited) == 1


async def test_without_room_it_waits_until_one_leaves():
    rig = Rig(room=1)
    first = await rig.admit(Ask(A, 10, 10))
    assert not rig.gate.idle
    second = await rig.queued(Ask(B, 10, 10))
    rig.finish(first)
    rig.gate.leave((await soon(second)).id, 3)
    assert rig.quiet()


async def test_room_that_only_the_view_knows_of_is_found_by_polling():
    rig = Rig(room=0)
    waiting = await rig.queued(Ask(A, 10, 10))
    rig.workers.room = 1
    assert (await soon(waiting)).waited_s < 100 * POLL_S
    looks = rig.workers.looks
    await asyncio.sleep(5 * POLL_S)
    assert rig.workers.looks == looks, "nobody waits: nobody looks"


async def test_a_burst_is_let_through_one_by_one_as_the_view_is_charged():
    """What was let go and not placed yet counts, so that stale facts do not open the gate for all."""
    rig = Rig(room=3)
    permits = await asyncio.gather(*(rig.gate.enter(Ask(A, 10, 10)) for _ in range(3)))
    fourth = await rig.queued(Ask(A, 10, 10))
    for permit in permits:
        rig.place(permit)
    await asyncio.sleep(3 * POLL_S)
    assert not fourth.done()
    rig.finish(permits[0])
    await soon(fourth)


async def test_placing_more_often_than_there_are_generations_changes_nothing():
    rig = Rig(room=10)
    permit = await rig.gate.enter(Ask(A, 10, 10, generations=2))
    assert rig.gate._ahead == Ahead(2, 10)
    for _ in range(5):
        rig.gate.placed(permit.id)
    assert rig.gate._ahead == Ahead()
    rig.gate.leave(permit.id, 7)
    rig.gate.leave(permit.id, 7)
    rig.gate.placed(permit.id)
    assert rig.quiet() and rig.left == [("a", 7)]


async def test_max_requests_bounds_what_runs():
    rig = Rig(room=100, max_requests=2)
    first = await rig.gate.enter(Ask(A, 1, 1, generations=2))
    waiting = await rig.queued(Ask(A, 1, 1))
    rig.gate.leave(first.id, 0)
    await soon(waiting)


# ---- fairness ----


async def test_a_flood_does_not_delay_another_key():
    """200 requests of `flood` wait; what `calm` then sends goes next but one, each time."""
    rig = Rig(room=1)
    running = await rig.admit(Ask(A, QUANTUM_TOKENS, 0))
    order: list[str] = []

    async def ask(name: str, key: KeyFacts) -> None:
        permit = await rig.admit(Ask(key, QUANTUM_TOKENS, 0))
        order.append(name)
        await asyncio.sleep(0)
        rig.finish(permit, QUANTUM_TOKENS)

    flood = [asyncio.create_task(ask("flood", A)) for _ in range(200)]
    await asyncio.sleep(0)
    calm = [asyncio.create_task(ask(f"calm{i}", B)) for i in range(3)]
    await asyncio.sleep(0)
    rig.finish(running, QUANTUM_TOKENS)
    async with asyncio.timeout(10):
        await asyncio.gather(*flood, *calm)
    assert [order.index(f"calm{i}") for i in range(3)] <= [1, 3, 5]
    assert rig.quiet()


@pytest.mark.parametrize("queued", [True, False], ids=["of the queue", "that never waited"])
async def test_what_a_request_did_not_use_is_saved_for_its_key(queued):
    """`a` asks for two quanta and uses next to nothing; so all its others go before the second of `b`. One that took nothing from
    its key's turns gives nothing back to them."""
    rig = Rig(room=1)
    running = await rig.admit(Ask(B if queued else A, 1, 2 * QUANTUM_TOKENS))
    order: list[str] = []

    async def ask(key: KeyFacts) -> None:
        permit = await rig.admit(Ask(key, 2 * QUANTUM_TOKENS, 0))
        order.append(key.name)
        await asyncio.sleep(0)
        rig.finish(permit, 1 if queued and key is A else 2 * QUANTUM_TOKENS)

    tasks = [asyncio.create_task(ask(key)) for _ in range(6) for key in (A, B)]
    await asyncio.sleep(0)
    rig.finish(running, 1)
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks)
    assert "".join(order) == ("abaaaaabbbbb" if queued else "abababababab")


async def test_a_full_queue_sheds_the_last_of_the_key_with_most():
    rig = Rig(room=0, queue_requests=3)
    flood = [await rig.queued(Ask(A, 100, 0)) for _ in range(3)]
    calm = asyncio.create_task(rig.gate.enter(Ask(B, 100, 0)))
    with pytest.raises(Shed, match="3 requests may wait here, key a has most") as told:
        await soon(flood[2])
    assert (told.value.refusal.why, told.value.refusal.key, told.value.refusal.retry_after_s) == (
        ShedReason.QUEUE_FULL,
        "a",
        1.0,
    )
    with pytest.raises(Shed):
        await rig.gate.enter(Ask(A, 100, 0))
    assert rig.gate.waiting == 3 and not calm.done() and rig.shed == [("a", ShedReason.QUEUE_FULL)] * 2
    rig.workers.room = 9
    await asyncio.gather(soon(calm), *map(soon, flood[:2]))


# ---- limits and time ----


async def test_the_deadline_is_an_error_and_gives_everything_back():
    key = dataclasses.replace(A, tokens_per_min=100)
    rig = Rig(room=0, queue_s=0.05)
    with pytest.raises(WaitedTooLong, match=r"within 0.05 s") as told:
        await rig.gate.enter(Ask(key, 50, 50))
    assert told.value.http_status == 504 and told.value.refusal.retry_after_s >= 1
    assert rig.quiet() and rig.shed == [("a", ShedReason.DEADLINE)]
    assert rig.gate._keys["a"].quotas(time.monotonic()).tokens.remaining == 100


async def test_limits_shed_before_the_queue():
    key = dataclasses.replace(A, requests_per_min=1)
    rig = Rig(room=1)
    await rig.gate.enter(Ask(key, 1, 1))
    with pytest.raises(Shed) as told:
        await rig.gate.enter(Ask(key, 1, 1))
    assert told.value.refusal.why is ShedReason.REQUESTS_PER_MIN and 59 < told.value.refusal.retry_after_s <= 60
    assert rig.gate.waiting == 0 and rig.shed == [("a", ShedReason.REQUESTS_PER_MIN)]


async def test_what_can_never_fit_does_not_wait():
    def fits(ask: Ask) -> None:
        raise TooLong(f"{ask.longest} over 8")

    rig = Rig(room=0, fits=fits)
    with pytest.raises(TooLong):
        await rig.gate.enter(Ask(A, 9, 1, longest=(9, 1)))
    assert rig.quiet() and rig.shed == []


async def test_nobody_waits_for_workers_that_are_not_there():
    """The choice says what is missing."""
    rig = Rig(room=0)
    waiting = await rig.queued(Ask(A, 1, 1))
    rig.workers.nobody = True
    await soon(waiting)
    await rig.gate.enter(Ask(A, 1, 1))


async def test_an_slo_sheds_once_the_wait_makes_it_impossible():
    key = dataclasses.replace(A, slo_ttft_s=0.2)
    rig = Rig(room=0)
    started = time.monotonic()
    with pytest.raises(Shed, match=r"later than the 0.2 s of key a") as told:
        await rig.gate.enter(Ask(key, 10, 10, least_ttft_s=0.1))
    assert told.value.refusal.why is ShedReason.SLO and 0.09 < time.monotonic() - started < 5
    with pytest.raises(Shed):
        await rig.gate.enter(Ask(key, 10, 10, least_ttft_s=0.3))
    assert rig.quiet()


async def test_an_slo_sheds_at_once_when_the_queue_is_known_to_be_too_slow():
    """1,000 tokens a second are let go and 20,000 wait: 10 s are no time to wait for a first token within 2."""
    rig = Rig(room=0)
    now = time.monotonic()
    rig.gate._drain.waits(now - 5)
    rig.gate._drain.let_go(5000, now)
    waiting = [await rig.queued(Ask(A, 1000, 0)) for _ in range(20)]
    with pytest.raises(Shed) as told:
        await rig.gate.enter(Ask(dataclasses.replace(A, slo_ttft_s=2.0), 1000, 0))
    assert told.value.refusal.why is ShedReason.SLO and 15 < told.value.refusal.retry_after_s < 20
    assert "key a allows 2 s" in told.value.message and rig.gate.waiting == 20
    patient = await rig.queued(Ask(dataclasses.replace(B, slo_ttft_s=4.0), 1000, 0))  # its turn comes in about 2 s
    for task in (*waiting, patient):
        task.cancel()
    await asyncio.gather(*waiting, patient, return_exceptions=True)
    assert rig.quiet()


# ---- clients that leave ----


async def test_a_client_that_leaves_the_queue_takes_nothing():
    key = dataclasses.replace(A, tokens_per_min=1000)
    rig = Rig(room=0)
    first, second = await rig.queued(Ask(key, 400, 0)), await rig.queued(Ask(key, 400, 0))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert rig.gate.waiting == 1 and rig.gate.held == 1
    rig.workers.room = 1
    rig.gate.leave((await soon(second)).id, 0)
    assert rig.quiet() and rig.gate._keys["a"].quotas(time.monotonic()).tokens.remaining == 1000


async def test_a_client_that_leaves_in_the_moment_it_is_let_through():
    rig = Rig(room=0)
    task = await rig.queued(Ask(A, 10, 0))
    rig.workers.room = 1
    rig.gate._full_until_s = 0.0  # how long the last look took, on a busy machine, is nothing to this
    rig.gate._pump()  # its turn has come, its task has not run yet
    assert rig.gate.waiting == 0 and rig.gate.held == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and rig.quiet()


@pytest.mark.parametrize("seed", range(3))
async def test_no_permit_is_lost_whatever_clients_do(seed):
    """300 requests of 5 keys come, wait, run, leave, are cancelled at any moment, time out or are shed."""
    rng = random.Random(seed)
    rig = Rig(room=4, queue_requests=20, queue_s=0.05)
    keys = [KeyFacts(f"k{i}", weight=rng.choice([1, 3]), concurrent=rng.choice([None, 5]), slo_ttft_s=0.04 if i else None)
            for i in range(5)]  # fmt: skip
    counts = itertools.count()

    async def client() -> None:
        ask = Ask(
            rng.choice(keys), rng.randint(1, 5000), rng.randint(1, 100), rng.choice([1, 1, 3]), rng.randint(-2, 2)
        )
        permit = await rig.gate.enter(ask)
        placed = 0
        try:
            if rng.random() < 0.9:
                placed = ask.generations
                rig.workers.placed += placed
                for _ in range(placed):
                    rig.gate.placed(permit.id)
            await asyncio.sleep(rng.random() * 0.02)
        finally:
            rig.workers.placed -= placed
            rig.gate.leave(permit.id, rng.randint(0, ask.tokens))
        next(counts)

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(client()))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.01)
        if rng.random() < 0.4:
            rng.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(r) for r in results} <= {type(None), asyncio.CancelledError, Shed, WaitedTooLong}
    assert next(counts) > 50 and rig.quiet() and rig.workers.placed == 0


def test_what_crosses_the_gate_can_be_sent():
    """A gate may be asked from another process."""
    ask = Ask(KeyFacts("k", "t", slo_ttft_s=1.0), 10, 20)
    assert pickle.loads(pickle.dumps(ask)) == ask
    permit = Permit(3, 0.5)
    assert pickle.loads(pickle.dumps(permit)) == permit
    refusal = Refusal("too much", ShedReason.SLO, "k", 2.5)
    for error in (Shed(refusal), WaitedTooLong(refusal)):
        sent = pickle.loads(pickle.dumps(error))
        assert (type(sent), sent.refusal, sent.message) == (type(error), refusal, "too much")
