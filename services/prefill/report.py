"""The engine's reports to the hand-offs they concern, and the sessions those belong to. Requests of routers are refused."""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from services.prefill.metrics import PrefillMetrics
from services.prefill.offer import Offers, Replies
from twinflow.contracts.errors import BadRequest, HandoffFailed, ModelError, TwinflowError, Unsupported
from twinflow.engine.base import Done, Generated, Notice, Offered, Prefilled
from twinflow.engine.front import Front
from twinflow.engine.routers import RouterStream
from twinflow.node.handshake import GENERATIONS
from twinflow.rpc.v1 import admin_pb2 as admin_pb
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.transfer.base import GenerationClosed, GenerationOpened, PeerArena
from twinflow.transfer.leases import LeaseTable, SessionKey

log = logging.getLogger(__name__)

EXPIRE_EVERY_S = 1.0
CREDITS = 64


@dataclass(frozen=True, slots=True)
class _Session:
    replies: Replies
    features: frozenset[str]  # the reader's


class Handoffs:
    """Owned by the front's loop. Raises ModelError if the engine has no arena to read from. `arena` is what readers of
    new sessions and hand-offs are told."""

    def __init__(self, front: Front, max_open: int, credits: int = CREDITS) -> None:
        if front.ready.arena is None:
            raise ModelError("a prefill worker needs a transport; engine.transport is none")
        times = front.config.session
        self.arena: PeerArena = front.ready.arena
        self.credits = credits
        self._front = front
        self._leases = LeaseTable(front.incarnation, self.arena.generation)
        self._sessions: dict[SessionKey, _Session] = {}
        self.metrics = PrefillMetrics(front.metrics.registry, lambda: len(self._leases), lambda: len(self._sessions))
        self.offers = Offers(self._leases, self.metrics, front.engine.send, front.ready, max_open, times.lease_s)
        front.silence.listeners.append(self._engine_silence)
        self._expiry = asyncio.create_task(self._expire(min(EXPIRE_EVERY_S, times.lease_s / 4)), name="lease-expiry")

    @property
    def sessions(self) -> tuple[SessionKey, ...]:
        return tuple(self._sessions)

    # ---- sessions of decode workers ----

    def features_of(self, session: SessionKey) -> frozenset[str]:
        """What the reader of an open session has named."""
        return self._sessions[session].features

    def session_opened(self, session: SessionKey, replies: Replies, features: Collection[str] = ()) -> None:
        """Ends older sessions of the same decode worker. Raises BadRequest if this very one is open."""
        if session in self._sessions:
            raise BadRequest(f"session epoch {session.epoch} of {session.worker_id} is already open")
        self.offers.close_all(self._leases.open_session(session), "its session was replaced")
        for old in [s for s in self._sessions if s.worker_id == session.worker_id]:
            self._sessions.pop(old).replies.close()
        self._sessions[session] = _Session(replies, frozenset(features))

    def session_ended(self, session: SessionKey, why: str) -> None:
        """For good: whatever this session was promised may be overwritten from here on."""
        self._sessions.pop(session, None)
        ended = self._leases.end_session(session)
        self.offers.close_all(ended, why)
        log.info("session with decode worker %s is over: %s, %d leases ended", session.worker_id, why, len(ended))

    # ---- the engine ----

    def notice(self, notice: Notice) -> None:
        match notice:
            case Offered():
                self.offers.announced(notice)
            case Generated():
                self.offers.generated(notice)
            case Prefilled():
                self.offers.prefilled(notice)
            case Done():
                self.offers.done(notice)
            case GenerationOpened():
                self._renewed(notice)
            case GenerationClosed():
                self.offers.generation_closed(notice.generation)
            case _:
                log.warning("the engine sent an unexpected %s", type(notice).__name__)

    def token(self, request_id: str, token_id: int) -> None:
        log.warning("the engine sent a second token of request %s", request_id)

    def _renewed(self, opened: GenerationOpened) -> None:
        """Every reader is told; one that does not know the message gets a new session, with a new hello."""
        self.arena = replace(
            self.arena,
            generation=opened.generation,
            agent_name=opened.agent_name,
            agent_metadata=opened.agent_metadata,
        )
        self._leases.open_generation(opened.generation)
        renewed = pb.Renewed(generation=opened.generation, ranks=[arena_info(self.arena)])
        for session in self._sessions.values():
            if GENERATIONS in session.features:
                session.replies.put(pb.HandoffReply(renewed=renewed))
            else:
                session.replies.close()

    def engine_lost(self, error: TwinflowError) -> None:
        self.offers.fail_all(error)
        self._close_sessions()

    def check_engine_heard(self) -> None:
        """Raises HandoffFailed while the engine's process stands still."""
        if self._front.silence.lasts:
            raise self._unheard()

    def _engine_silence(self) -> None:
        """Readers wait for an engine that may never go on: they do better elsewhere."""
        if self._front.silence.lasts:
            self.offers.fail_all(self._unheard())

    def _unheard(self) -> HandoffFailed:
        silent_s = self._front.silence.silent_s
        return HandoffFailed(
            f"prefill worker {self._front.worker_id} has heard nothing from its engine process for {silent_s:.1f} s"
        )

    # ---- routers ----

    def submit(self, stream: RouterStream, message: pb.Submit) -> None:
        """Always raises: a prefill worker answers no requests."""
        raise Unsupported(f"{self._front.worker_id} is a prefill worker; submit to a decode worker")

    def cancel(self, stream: RouterStream, request_id: str) -> None:
        pass

    def stream_ended(self, stream: RouterStream) -> None:
        pass

    # ---- the admin API ----

    def about(self, request_id: str) -> tuple[str, str]:
        return self.offers.about(request_id)

    def leases(self) -> list[admin_pb.Lease]:
        return self.offers.describe()

    def left(self) -> tuple[int, int]:
        return 0, len(self.offers)

    def cancel_where(self, meant: Callable[[str], bool]) -> list[str]:
        return self.offers.cancel_where(meant)

    async def close(self) -> None:
        self._expiry.cancel()
        await asyncio.gather(self._expiry, return_exceptions=True)
        self._close_sessions()

    def _close_sessions(self) -> None:
        for session in self._sessions.values():
            session.replies.close()

    async def _expire(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.offers.expire()


def arena_info(arena: PeerArena) -> pb.ArenaInfo:
    return pb.ArenaInfo(
        base_address=arena.base_address,
        total_bytes=arena.total_bytes,
        block_bytes=arena.block_bytes,
        slot_bytes=arena.slot_bytes,
        blocks=arena.blocks,
        slots=arena.slots,
        memory=arena.memory,
        device_id=arena.device_id,
        agent_name=arena.agent_name,
        agent_metadata=arena.agent_metadata,
    )
