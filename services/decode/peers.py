"""The sessions to prefill workers: one per worker incarnation, opened on first use, closed when idle."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.decode.session import Session, SessionKey
from twinflow.contracts.errors import HandoffFailed, Incompatible
from twinflow.node.handshake import Layout
from twinflow.node.pulse import SessionTimes
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.transfer.base import PeerKey

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Link:
    session: Session
    connecting: "asyncio.Task[None]"


class Peers:
    """`on_gone` is told the transfer key of every peer, or older generation of one, that nobody reads from any more."""

    def __init__(
        self,
        own: Layout,
        incarnation: str,
        features: Iterable[str],
        times: SessionTimes,
        on_gone: Callable[[PeerKey], None],
    ) -> None:
        self._own = own
        self._incarnation = incarnation
        self._features = frozenset(features)
        self._times = times
        self._on_gone = on_gone
        self._links: dict[SessionKey, _Link] = {}
        self._sweeper = asyncio.create_task(self._close_idle(), name="idle-sessions")

    @property
    def sessions(self) -> list[Session]:
        return [link.session for link in self._links.values()]

    async def get(self, candidate: pb.Candidate) -> Session:
        """A live session, shared by everybody who asks meanwhile. Raises HandoffFailed, or Incompatible, also for a peer that
        is refused as long as its session lasts."""
        if not candidate.addresses:
            raise HandoffFailed(f"prefill worker {candidate.worker_id} was offered without an address")
        key = (candidate.worker_id, candidate.incarnation)
        link = self._links.get(key)
        if link is None:
            session = Session(
                key, candidate.addresses[0], self._own, self._incarnation, self._features, self._times,
                self._ended, self._on_gone,
            )  # fmt: skip
            link = self._links[key] = _Link(session, asyncio.create_task(session.connect()))
            link.connecting.add_done_callback(lambda t: t.cancelled() or t.exception())  # nobody may be left to ask
        await asyncio.shield(link.connecting)
        if link.session.refused:
            raise Incompatible(link.session.refused)
        return link.session

    def _ended(self, session: Session) -> None:
        link = self._links.get(session.key)
        if link is not None and link.session is session:
            del self._links[session.key]

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._times.idle_s / 4))
            now = asyncio.get_running_loop().time()
            for session in self.sessions:
                if session.live and not session.open_handoffs and now - session.idle_since_s > self._times.idle_s:
                    session.end(f"nothing to hand off for {self._times.idle_s:g} s")

    async def close(self) -> None:
        self._sweeper.cancel()
        links = list(self._links.values())
        for link in links:
            link.session.end("this worker is stopping")
        await asyncio.gather(*(link.connecting for link in links), *(link.session.closed() for link in links),
                             self._sweeper, return_exceptions=True)  # fmt: skip
