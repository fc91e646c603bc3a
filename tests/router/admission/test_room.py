"""Whether workers should get more, from facts alone."""

import dataclasses
from collections.abc import Iterator

import pytest

from services.router.admission.room import Ahead, Room, look
from services.router.schedule.base import RouteRequest, WorkerFacts
from services.router.schedule.policies import policy_named
from services.router.schedule.rates import Curve, Rates
from twinflow.contracts.workers import Load, Role, WorkerRecord

REQUEST = RouteRequest(model="m", prompt_tokens=1, max_tokens=1, tie_seed=0)
POLICY = policy_named("cost")
RATES = Rates(prefill=Curve(((6, 1000.0, 10), (16, 1000.0, 10))))  # 1,000 tokens a second, whatever the length


def worker(
    role: Role, queued: int = 0, active: int = 0, slots: int = 4, waiting: int = 0, full_at: int = 0, **record: object
) -> WorkerFacts:
    load = Load(total_slots=slots, waiting=waiting)
    facts = WorkerRecord("w", "i", role, (), "m", "f", 4096, 4096, 64, load=load)
    return WorkerFacts(dataclasses.replace(facts, **record), True, active, queued, rates=RATES, full_at=full_at)


def room(*workers: WorkerFacts, ahead: Ahead | None = None, work_s: float = 1.0) -> Room:
    return look(workers, {}, REQUEST, POLICY, work_s, ahead or Ahead())


P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
CASES = {
    "idle pair": ((worker(P), worker(D)), Room.FREE),
    "prefill has a second of work": ((worker(P, queued=1000), worker(D)), Room.FULL),
    "a little less": ((worker(P, queued=900), worker(D)), Room.FREE),
    "one prefill worker of two is free": ((worker(P, queued=5000), worker(D), worker(P)), Room.FREE),
    "all slots are taken": ((worker(P), worker(D, active=4)), Room.FULL),
    "one decode worker of two is free": ((worker(D, active=4), worker(P), worker(D, active=3)), Room.FREE),
    "slots are free but some wait for memory": ((worker(P), worker(D, active=2, waiting=1)), Room.FULL),
    "it was full with fewer, and gets one more": ((worker(P), worker(D, slots=256, active=8, full_at=8)), Room.FREE),
    "not two more": ((worker(P), worker(D, slots=256, active=9, full_at=8)), Room.FULL),
    "a large one gets some more": ((worker(P), worker(D, slots=256, active=136, full_at=128)), Room.FREE),
    "not as many as there are slots": ((worker(P), worker(D, slots=256, active=137, full_at=128)), Room.FULL),
    "slots are not known": ((worker(P), worker(D, slots=0, active=500)), Room.FREE),
    "decode alone": ((worker(D),), Room.FREE),
    "decode alone with work": ((worker(D, queued=2000),), Room.FULL),
    "decode alone without slots": ((worker(D, active=4),), Room.FULL),
    "decode's own work does not matter beside prefill workers": ((worker(D, queued=2000), worker(P)), Room.FREE),
    "aggregated": ((worker(BOTH),), Room.FREE),
    "aggregated and full of prompts": ((worker(BOTH, queued=1000),), Room.FULL),
    "aggregated without slots": ((worker(BOTH, active=4),), Room.FULL),
    "nobody": ((), Room.NOBODY),
    "nobody decodes": ((worker(P),), Room.NOBODY),
    "of another model": ((worker(D, model="other"),), Room.NOBODY),
    "draining": ((worker(D, draining=True),), Room.NOBODY),
    "a slot and a free prefill worker of different layouts": (
        (worker(P, fingerprint="g"), worker(D, fingerprint="g", active=4), worker(P, queued=9000), worker(D)),
        Room.FULL,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_room(case):
    workers, expected = CASES[case]
    assert room(*workers) is expected


def test_what_was_let_go_but_not_charged_counts_as_taken():
    pair = (worker(P), worker(D, active=1))
    assert room(*pair, ahead=Ahead(2, 500)) is Room.FREE
    assert room(*pair, ahead=Ahead(3, 500)) is Room.FULL, "three slots, three on their way"
    assert room(*pair, ahead=Ahead(1, 1000)) is Room.FULL, "a second of prompts is on its way"
    assert room(*pair, worker(P, queued=500), ahead=Ahead(1, 1000)) is Room.FREE, "another half a second"


def test_an_idle_worker_is_as_fast_as_what_is_on_its_way_to_it():
    """Short prompts are slow per token; with their rate one long prompt would fill a worker that has nothing to do."""
    rates = Rates(prefill=Curve(((10, 50_000.0, 10), (14, 80_000.0, 10))))
    pair = (dataclasses.replace(worker(P), rates=rates), worker(D))
    assert [room(*pair, ahead=Ahead(n, n * 17_408)) for n in (1, 2, 3)] == [Room.FREE] * 3
    assert room(*pair, ahead=Ahead(3, 5 * 17_408)) is Room.FULL


def test_looking_ends_at_the_first_room():
    seen = []

    def facts() -> Iterator[WorkerFacts]:
        for i in range(200):
            seen.append(i)
            yield worker(P if i % 2 else D)

    assert look(facts(), {}, REQUEST, POLICY, 1.0, Ahead()) is Room.FREE
    assert len(seen) == 2
