"""What one worker says in its session, to whom it concerns: tokens to their requests, load and cache events to the view."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from services.router.view.view import View
from twinflow.contracts.errors import BadRequest, TwinflowError
from twinflow.contracts.events import CacheEvent
from twinflow.contracts.requests import RequestStats, Sample
from twinflow.contracts.workers import WorkerRecord
from twinflow.rpc import convert
from twinflow.rpc.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

FEW_EVENTS = 32  # of a step nobody waits for: to come back for so few costs more than it spares


class Taker(Protocol):
    """One request, as far as a worker's reports go."""

    stats: RequestStats | None
    begun: bool  # a token came

    def put(self, samples: Sequence[Sample]) -> None:
        """Tokens; the last one has `finish`."""
        ...

    def put_token(self, token_id: int) -> None:
        """One token that ends nothing and has no logprobs."""
        ...

    def fail(self, error: TwinflowError) -> None:
        """The worker gave the request up."""
        ...


class Reports:
    """Of one worker incarnation. `takers` by request id; it is the caller's and changes meanwhile."""

    def __init__(
        self,
        record: WorkerRecord,
        view: View,
        takers: Mapping[str, Taker],
        resync: Callable[[], None],
        events: bool = True,
        later: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """`resync` asks the worker for all of its cache contents; without `events` they are not followed. `later` calls what it
        is given, soon: a first token does not wait until the view has its worker's load, and the hundreds of blocks that were
        stored with it."""
        self._events = events
        self._later = later
        self._waiting: list[pb.StepReport] = []  # that the view does not know yet, in order
        self._passed_over = False  # some were, as was told
        self._record = record
        self._view = view
        self._takers = takers
        self._resync = resync

    def handle(self, message: pb.WorkerMessage) -> None:
        """Raises whatever a message raises whose tokens cannot be read: they are lost, and none that could be another request's
        was given on."""
        kind = message.WhichOneof("message")
        if kind == "step":
            self._on_step(message.step)
        elif kind == "snapshot":
            self._on_snapshot(message.snapshot)
        elif kind == "heartbeat":
            self._view.set_engine_silence(self._record.key, message.heartbeat.engine_silent_s)

    def _on_step(self, step: pb.StepReport) -> None:
        ids, token_ids, find = step.token_requests, step.token_ids, self._takers.get
        if len(ids) != len(token_ids):
            raise BadRequest(f"a step has {len(token_ids)} tokens for {len(ids)} requests")
        first = False  # a token that somebody waits for
        if ids:  # an empty list of protobuf is slow to walk
            for id, token_id in zip(ids, token_ids, strict=True):  # nearly all
                taker = find(id)
                if taker is not None:
                    first = first or not taker.begun
                    taker.put_token(token_id)
        for output in step.outputs or ():
            taker = find(output.id)
            if taker is None:  # cancelled meanwhile
                continue
            first = first or not taker.begun
            samples = output.samples
            if len(samples) == 1:
                sample = samples[0]
                if _is_plain(sample, output):  # of a worker that knows no columns, nearly all
                    taker.put_token(sample.token_id)
                    continue
            if output.HasField("stats"):
                taker.stats = convert.stats_from_pb(output.stats)
            taker.put(convert.samples_from_pb(samples))
            if output.HasField("error"):
                taker.fail(convert.error_from_pb(output.error))
        if self._waiting or first or len(step.event_columns.kinds or step.events) > FEW_EVENTS:
            self._waiting.append(step)
            if len(self._waiting) == 1:
                self._later(self.catch_up)
        else:
            self._tell(step)

    def catch_up(self) -> None:
        """The view follows all that has come."""
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            self._tell(step)

    def _tell(self, step: pb.StepReport) -> None:
        """The view, of what a step says of its worker."""
        key = self._record.key
        if step.HasField("load"):
            self._view.set_load(key, convert.load_from_pb(step.load))
        told = self._events and (step.HasField("event_columns") or step.events)
        if told and self._follow(step, lambda events: self._view.apply(key, events)):
            log.info("cache events of worker %s have a gap: asking for a snapshot", self._record.id)
            self._resync()

    def _on_snapshot(self, snapshot: pb.Snapshot) -> None:
        self.catch_up()
        key, sequence = self._record.key, snapshot.sequence
        if self._follow(snapshot, lambda contents: self._view.replace(key, sequence, contents)):
            self._resync()

    def _follow(self, told: pb.StepReport | pb.Snapshot, change: Callable[[Iterable[CacheEvent]], bool]) -> bool:
        """What `change` says. Events of a kind that a newer release has, or that make no sense, are passed over: they are hints,
        and no reason to lose a worker."""
        try:
            if not told.HasField("event_columns"):  # of a worker of an earlier release
                return change(convert.events_from_pb(told.events))
            events = convert.event_columns_from_pb(told.event_columns)
            if unknown := events.unknown_kinds:
                self._pass_over(BadRequest(f"unknown event kinds {sorted(set(unknown))}"))
            return change(events)
        except Exception as e:  # process edge
            self._pass_over(e)
            return False

    def _pass_over(self, why: Exception) -> None:
        if not self._passed_over:
            log.warning("cache events of worker %s are passed over", self._record.id, exc_info=why)
        self._passed_over = True


def _is_plain(sample: pb.Sample, output: pb.Output) -> bool:
    return not (sample.finish or sample.HasField("logprobs") or output.HasField("stats") or output.HasField("error"))
