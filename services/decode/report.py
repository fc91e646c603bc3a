"""The table of running requests: what routers ask for on one side, what the engine's reports say on the other."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.decode.claim import Kind, decide, needs_match, wanted_checkpoint
from services.decode.config import DecodeConfig
from services.decode.emit import Answer
from services.decode.join import ATTEMPTS, Handoff, hand_off
from services.decode.metrics import DecodeMetrics
from services.decode.peers import Peers
from services.decode.session import Session
from twinflow.contracts.errors import BadRequest, Incompatible, NoCapacity, Overloaded, TwinflowError
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.requests import GenerateRequest
from twinflow.engine.base import (
    Cancel,
    Done,
    Generated,
    HandoffLost,
    Matched,
    Mode,
    Notice,
    PeerGone,
    PullDone,
    RunLocal,
    Submit,
)
from twinflow.engine.front import Front
from twinflow.engine.limits import check_request
from twinflow.engine.routers import RouterStream
from twinflow.node.handshake import features
from twinflow.rpc.convert import request_from_submit
from twinflow.rpc.v1 import admin_pb2 as admin_pb
from twinflow.rpc.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Running:
    """One request from Submit to the engine's Done. `opening` looks for a prefill worker, then `handoff` is the open one.
    `request.forced` grows by a first token that a lost hand-off had sampled; `lost` are the workers of these."""

    request: GenerateRequest
    answer: Answer
    candidates: tuple[pb.Candidate, ...]
    idempotency_id: str
    local_max_tokens: int  # the router's limit for this request, else this worker's own
    opening: "asyncio.Task[None] | None" = None
    handoff: Handoff | None = None
    lost: list[str] = field(default_factory=list)

    @property
    def eligible(self) -> tuple[pb.Candidate, ...]:
        """Prefill workers still to be tried; none once enough hand-offs were lost."""
        if len(self.lost) >= ATTEMPTS:
            return ()
        return tuple(c for c in self.candidates if c.worker_id not in self.lost)


class Requests:
    """Owned by the front's loop; every entry leaves with the engine's `Done`, or all with the engine."""

    def __init__(self, front: Front, config: DecodeConfig) -> None:
        self._front = front
        self._config = config
        self._role = config.engine.role
        self._send = front.engine.send
        self._running: dict[str, Running] = {}
        offers = features(verify=config.engine.verify == "checksum")
        self.peers = Peers(
            front.layout, front.incarnation, offers, config.session, lambda key: self._send(PeerGone(key))
        )
        self.metrics = DecodeMetrics(front.metrics.registry, lambda: len(self.peers.sessions))

    def __len__(self) -> int:
        return len(self._running)

    # ---- routers ----

    def submit(self, stream: RouterStream, message: pb.Submit) -> None:
        """Idempotent per id on one stream. Raises BadRequest or TooLong for what cannot run here, Draining while nothing
        new is taken."""
        try:
            self._submit(stream, message)
        except TwinflowError as e:
            self.metrics.refused(e)
            raise

    def _submit(self, stream: RouterStream, message: pb.Submit) -> None:
        known = self._running.get(message.id)
        if known is not None:
            if known.answer.stream is not stream:
                raise BadRequest(f"request id {message.id!r} is running for another router", param="id")
            return
        self._front.check_not_draining()
        request = request_from_submit(message)
        check_request(request, self._front.ready, generates=True)
        answer = Answer(request.id, stream, self._front.worker_id, message.reason, message.gather_tokens)
        own = self._config.local_max_tokens
        limit = message.local_max_tokens if message.HasField("local_max_tokens") else own
        entry = Running(request, answer, tuple(message.candidates), message.idempotency_id, limit)
        self._running[request.id] = entry
        if needs_match(self._role, len(entry.candidates)):
            self._send(Submit(request, Mode.CLAIM))
        else:
            answer.route = Kind.LOCAL.value
            self._send(Submit(request, Mode.LOCAL))

    def cancel(self, stream: RouterStream, request_id: str) -> None:
        """Unknown ids, and those of other routers, are ignored."""
        entry = self._running.get(request_id)
        if entry is not None and entry.answer.stream is stream:
            self._cancel(entry)

    def stream_ended(self, stream: RouterStream) -> None:
        for entry in list(self._running.values()):
            if entry.answer.stream is stream:
                self._cancel(entry)

    def _cancel(self, entry: Running) -> None:
        """The entry stays until the engine's Done."""
        entry.answer.cancelled = True
        self._leave(entry)
        self._send(Cancel(entry.request.id))

    # ---- the admin API ----

    def about(self, request_id: str) -> tuple[str, str]:
        entry = self._running.get(request_id)
        return ("", "") if entry is None else (entry.answer.stream.router_id, entry.answer.prefill_worker)

    def leases(self) -> list[admin_pb.Lease]:
        """Nobody reads from a decode worker."""
        return []

    def left(self) -> tuple[int, int]:
        return len(self._running), 0

    def cancel_where(self, meant: Callable[[str], bool]) -> list[str]:
        entries = [e for e in self._running.values() if meant(e.request.id) and not e.answer.cancelled]
        for entry in entries:
            entry.answer.why_cancelled = "cancelled by an operator"
            self._cancel(entry)
        return [e.request.id for e in entries]

    def _leave(self, entry: Running) -> None:
        """The prefill side, if any, is told that nothing more is wanted."""
        if entry.opening is not None:
            entry.opening.cancel()
        if entry.handoff is not None:
            entry.handoff.leave()
        entry.opening = entry.handoff = None

    # ---- the engine ----

    def notice(self, notice: Notice) -> None:
        entry = self._running.get(getattr(notice, "id", ""))
        if entry is None:
            return
        match notice:
            case Generated():
                entry.answer.add(notice.samples)
            case Done():
                self._leave(entry)
                del self._running[notice.id]
                entry.answer.finish(notice)
                self.metrics.finished(entry.answer, notice)
            case Matched():
                self._decide(entry, notice)
            case HandoffLost():
                self._lost(entry, notice)
            case PullDone():
                if entry.handoff is not None:
                    entry.handoff.pull_done(notice)
            case _:
                log.warning("the engine sent an unexpected %s", type(notice).__name__)

    def token(self, request_id: str, token_id: int) -> None:
        entry = self._running.get(request_id)
        if entry is not None:
            entry.answer.add_token(token_id)

    def _decide(self, entry: Running, matched: Matched) -> None:
        if entry.answer.cancelled:
            return
        decision = decide(self._role, matched, len(entry.eligible), entry.local_max_tokens)
        log.debug("request %s: %s (%s)", matched.id, decision.kind.value, decision.reason)
        again = f", after {len(entry.lost)} lost hand-offs ({', '.join(entry.lost)})" if entry.lost else ""
        entry.answer.route, entry.answer.reason = decision.kind.value, decision.reason + again
        if decision.kind is Kind.LOCAL:
            self._send(RunLocal(matched.id))
        else:
            want = wanted_checkpoint(matched, self._front.ready.block_tokens, entry.local_max_tokens)
            entry.opening = asyncio.create_task(self._open(entry, matched.hold_tokens, want))

    def _lost(self, entry: Running, notice: HandoffLost) -> None:
        """`Matched` follows. What the client has stays: the first token, if it was forwarded, is never sampled again."""
        handoff = entry.handoff
        if handoff is None:
            return
        log.warning("request %s: %s", entry.request.id, notice.message)
        self.metrics.lost(handoff.worker_id, notice.reason, notice.cause or handoff.loss)
        entry.lost.append(handoff.worker_id)
        entry.answer.faulty_prefill_workers.append(handoff.worker_id)
        if notice.reason == Incompatible.reason:
            handoff.refuse(notice.message)
        if handoff.first is not None:
            forced = entry.request.forced + pack_tokens([handoff.first.token_id])
            entry.request = replace(entry.request, forced=forced)
        self._leave(entry)
        entry.answer.prefill_worker, entry.answer.prefill_stats = "", None

    async def _open(self, entry: Running, have_tokens: int, want_checkpoint_at: int) -> None:
        """The hand-off, or the prompt computed here when nobody takes it."""

        def begin(session: Session) -> Handoff:
            entry.handoff = Handoff(entry.request, entry.answer, session, self._send)
            return entry.handoff

        def not_taken(worker_id: str, error: TwinflowError) -> None:
            self.metrics.not_taken(worker_id, error)
            if not isinstance(error, NoCapacity | Overloaded):  # what is only full or draining is in good health
                entry.answer.faulty_prefill_workers.append(worker_id)

        wait_s = self._config.session.open_s
        problem = await hand_off(
            entry.eligible, self.peers, begin, have_tokens, want_checkpoint_at, entry.idempotency_id, wait_s,
            not_taken,
        )  # fmt: skip
        entry.opening = None
        if problem:
            entry.handoff = None
            entry.answer.route, entry.answer.reason = Kind.LOCAL.value, f"no prefill worker took it: {problem}"
            log.warning("request %s: prefilling here, %s", entry.request.id, entry.answer.reason)
            self._send(RunLocal(entry.request.id))

    def engine_lost(self, error: TwinflowError) -> None:
        for entry in self._running.values():
            self._leave(entry)
            entry.answer.fail(error)
            self.metrics.ended(entry.answer)
        self._running.clear()

    async def close(self) -> None:
        for entry in list(self._running.values()):
            self._cancel(entry)
        await self.peers.close()
