"""The output of one request towards its router: tokens as they come, then exactly one terminal output with the stats."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from twinflow.contracts.errors import Cancelled, Internal, TwinflowError, from_reason
from twinflow.contracts.requests import RequestStats, Sample
from twinflow.engine.base import Done
from twinflow.engine.routers import RouterStream
from twinflow.rpc.convert import error_to_pb, sample_to_pb, samples_to_pb, stats_to_pb
from twinflow.rpc.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)


class Answer:
    """The finishing sample is held back until the engine's `Done` (same report, as a rule), so that finish and stats leave
    as one terminal output. `gather_tokens`: as in `Submit`."""

    def __init__(
        self, request_id: str, stream: RouterStream, worker_id: str, reason: str, gather_tokens: int = 0
    ) -> None:
        self.id = request_id
        self.stream = stream
        self.over = False
        self.outcome = ""  # once over: ok, or an error's reason
        self.tokens = 0
        self.cancelled = False
        self.why_cancelled = "cancelled"
        self.route = ""
        self.reason = reason
        self.prefill_worker = ""
        self.prefill_generation = 0  # of that worker's transfer
        self.prefill_stats: RequestStats | None = None
        self.faulty_prefill_workers: list[str] = []
        self._worker_id = worker_id
        self._gather_tokens = gather_tokens
        self._gathered: list[Sample] = []
        self._last: Sample | None = None
        self._started_s = time.monotonic()
        self._first_s: float | None = None

    def add(self, samples: Sequence[Sample]) -> None:
        """Queues tokens for this report's message; nothing once a finishing one was seen."""
        if self.over or self._last is not None or not samples:
            return
        first = self._first_s is None
        if first:
            self._first_s = time.monotonic() - self._started_s
        self.tokens += len(samples)
        if samples[-1].finish is not None:
            self._last = samples[-1]
            samples = samples[:-1]
        self._gathered += samples
        if self._gathered and (first or len(self._gathered) >= self._gather_tokens):
            self.stream.add(pb.Output(id=self.id, samples=samples_to_pb(self._gathered)))
            self._gathered = []

    def add_token(self, token_id: int) -> None:
        """`add` of a token of which there is no more to say; a finishing one will follow."""
        if self._gather_tokens > 1:
            self.add((Sample(token_id),))
            return
        if self.over or self._last is not None:
            return
        if self._first_s is None:
            self._first_s = time.monotonic() - self._started_s
        self.tokens += 1
        self.stream.add_token(self.id, token_id)

    def add_now(self, sample: Sample) -> None:
        """The first token, from the prefill worker: does not wait for a report of the engine."""
        self.add((sample,))
        self.stream.flush()

    def finish(self, done: Done) -> None:
        """The terminal output: the last token with the stats, or an error. Only the first call counts."""
        error: TwinflowError | None = None
        if done.error_reason:
            error = from_reason(done.error_reason, done.error_message, done.error_param)
        elif self._last is None:
            error = (
                Cancelled(self.why_cancelled) if self.cancelled else Internal("the engine ended without a last token")
            )
        self._end(error, merge_stats(self, done.stats, self._worker_id))

    def fail(self, error: TwinflowError) -> None:
        """A terminal output that the engine has no part in."""
        self._end(error, RequestStats())
        self.stream.flush()

    def _end(self, error: TwinflowError | None, stats: RequestStats) -> None:
        if self.over:
            return
        self.over = True
        self.outcome = error.reason if error is not None else "ok"
        output = pb.Output(id=self.id, samples=samples_to_pb(self._gathered), stats=stats_to_pb(stats))
        if error is not None:
            output.error.CopyFrom(error_to_pb(error))
        elif self._last is not None:
            output.samples.append(sample_to_pb(self._last))
        self.stream.add(output)
        self._log(error, stats)

    def _log(self, error: TwinflowError | None, stats: RequestStats) -> None:
        took_s = time.monotonic() - self._started_s
        finish = self._last.finish.value if self._last and self._last.finish else "no finish"
        how = f"{error.reason}: {error.message}" if error else finish
        first = f", first after {self._first_s * 1e3:.0f} ms" if self._first_s is not None else ""
        moved = f", moved {stats.blocks_moved} blocks {stats.slots_moved} slots" if stats.blocks_moved else ""
        level = logging.WARNING if error and not self.cancelled else logging.INFO
        log.log(
            level,
            "request %s: %s, %d tokens in %.3f s%s, %s%s (%s), cached %d of %d prompt tokens%s",
            self.id,
            how,
            self.tokens,
            took_s,
            first,
            self.route or "not started",
            f" via {self.prefill_worker}" if self.prefill_worker else "",
            self.reason,
            stats.cached_tokens,
            stats.prompt_tokens,
            moved,
        )


def merge_stats(answer: Answer, own: RequestStats, worker_id: str) -> RequestStats:
    """The engine's stats, what the front knows of the route, and the prefill side's part if there was one."""
    merged = replace(
        own,
        route=answer.route,
        reason=answer.reason,
        decode_worker=worker_id,
        prefill_worker=answer.prefill_worker,
        faulty_prefill_workers=tuple(answer.faulty_prefill_workers),
    )
    theirs = answer.prefill_stats
    if theirs is None:
        return merged
    return replace(
        merged,
        prompt_tokens=own.prompt_tokens or theirs.prompt_tokens,
        cached_tokens=theirs.cached_tokens,
        prefill_attention_tokens=theirs.prefill_attention_tokens,
        prefill_checkpoints=theirs.prefill_checkpoints,
        prefill_resumed_tokens=theirs.prefill_resumed_tokens,
        extra={**theirs.extra, **own.extra},
    )
