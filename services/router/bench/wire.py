"""Between a simulated worker and the router: messages arrive, a little late, and as wrong as asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from services.router.bench.clock import VirtualClock
from services.router.dispatch.reports import Reports, Taker
from services.router.view.view import View
from twinflow.contracts.events import EventColumns, EventKind
from twinflow.contracts.workers import WorkerRecord
from twinflow.rpc import convert
from twinflow.rpc.v1 import engine_pb2 as pb

REPORT_S = 0.001
REMOVALS = (EventKind.BLOCK_REMOVED, EventKind.CHECKPOINT_REMOVED)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """`rates`: every worker's speed seems to be wrong by a factor drawn from 1 ± this, for good. `events_s`: cache events are
    late by this. `lost_removals`: this share of what a cache drops is never told, so that hits are overstated."""

    rates: float = 0.0
    events_s: float = 0.0
    lost_removals: float = 0.0


class Wire:
    """Of one worker. Events are numbered here, behind the loss, as a worker that does not know better would."""

    def __init__(
        self,
        record: WorkerRecord,
        view: View,
        takers: Mapping[str, Taker],
        clock: VirtualClock,
        disturbance: Disturbance,
        random: Random,
    ) -> None:
        self._reports = Reports(record, view, takers, resync=lambda: None)
        self._clock = clock
        self._disturbance = disturbance
        self._random = random
        self._factor = random.uniform(1 - disturbance.rates, 1 + disturbance.rates)
        self._sequence = 0

    def send(self, step: pb.StepReport) -> None:
        step.load.pace.busy_s *= self._factor
        for output in step.outputs:
            output.stats.transfer_s *= self._factor
        told = self._told(convert.event_columns_from_pb(step.event_columns))
        step.ClearField("event_columns")
        self._deliver(step, REPORT_S)
        if told:
            late = pb.StepReport(event_columns=convert.event_columns_to_pb(told))
            self._deliver(late, REPORT_S + self._disturbance.events_s)

    def _deliver(self, step: pb.StepReport, delay_s: float) -> None:
        self._clock.after(delay_s, lambda: self._reports.handle(pb.WorkerMessage(step=step)))

    def _told(self, events: EventColumns) -> EventColumns:
        lost = self._disturbance.lost_removals
        told = [e for e in events if not (lost and e.kind in REMOVALS and self._random.random() < lost)]
        first, self._sequence = self._sequence + 1, self._sequence + len(told)
        return replace(EventColumns.of(told), first=first)
