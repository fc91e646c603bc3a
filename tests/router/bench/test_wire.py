"""What the router is told too late, wrongly or never."""

from random import Random

import pytest

from services.router.bench.clock import VirtualClock
from services.router.bench.wire import REPORT_S, Disturbance, Wire
from services.router.view.prompt import PromptKeys
from services.router.view.view import View
from tests.router.view.test_index import IDS, RECORD, stored
from twinflow.contracts.events import CacheEvent, EventColumns, EventKind
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.workers import Load, Pace
from twinflow.rpc import convert
from twinflow.rpc.v1 import engine_pb2 as pb


class World:
    def __init__(self, disturbance: Disturbance, seed: int = 0) -> None:
        self.clock = VirtualClock()
        self.view = View(clock=self.clock)
        self.view.put(RECORD)
        self.view.set_connected(RECORD.key, True)
        self.wire = Wire(RECORD, self.view, {}, self.clock, disturbance, Random(seed))

    def send(self, events: list[CacheEvent], load: Load) -> None:
        columns = convert.event_columns_to_pb(EventColumns.of(events))
        self.wire.send(pb.StepReport(event_columns=columns, load=convert.load_to_pb(load)))

    def reach_at(self, time_s: float) -> tuple[int, int]:
        """(attention tokens, requests that run) as the router sees them then."""
        seen: list[tuple[int, int]] = []

        def look() -> None:
            (facts,) = self.view.snapshot(PromptKeys(pack_tokens(IDS))).workers
            seen.append((facts.attention_tokens, facts.record.load.running))

        self.clock.at(time_s, look)
        self.clock.run()
        return seen[0]


@pytest.mark.parametrize("late_s", [0.0, 5.0])
@pytest.mark.parametrize("after_s", [-0.01, 0.01])
def test_events_are_late_and_loads_are_not(late_s: float, after_s: float) -> None:
    world = World(Disturbance(events_s=late_s))
    world.send(stored(IDS), Load(running=3))
    arrives_s = REPORT_S + late_s
    loads = 3 if arrives_s + after_s > REPORT_S else 0
    assert world.reach_at(max(0.0, arrives_s + after_s)) == (20 if after_s > 0 else 0, loads)


def test_some_of_what_goes_is_never_told_and_leaves_no_gap() -> None:
    world = World(Disturbance(lost_removals=0.5))
    events = stored(IDS)
    gone = [CacheEvent(0, EventKind.BLOCK_REMOVED, e.prefix_hash, e.position) for e in events]
    for _ in range(20):
        world.send([*events, *gone], Load())
    world.clock.run()
    (worker,) = world.view._workers.values()
    assert not worker.feed.has_gap
    assert 20 * 5 * 1.3 < worker.feed.sequence < 20 * 5 * 1.7


def test_each_worker_seems_faster_or_slower_for_good() -> None:
    rates = []
    for seed in range(40):
        world = World(Disturbance(rates=0.3), seed)
        for k in (1, 2, 3):
            world.send([], Load(pace=Pace(k, 0.1 * k, 0, 10 * k)))
        world.clock.run()
        step_s = world.view.snapshot().workers[0].rates.step.at(10)
        assert step_s is not None and 0.07 <= step_s <= 0.13
        rates.append(step_s)
    assert min(rates) < 0.08 and max(rates) > 0.12
