"""One `Worker.Handoff` stream to one incarnation of a prefill worker; it carries every hand-off between the two.

Nothing here knows the engine: what the peer says of a hand-off goes to that hand-off's `Reader`. Once the stream is over,
nothing that arrives counts any more.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

import grpc

from twinflow.contracts.errors import HandoffFailed, Incompatible, Internal, Overloaded, TwinflowError
from twinflow.node.handshake import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Layout,
    negotiate,
    same_layout,
    same_verify,
)
from twinflow.node.outbox import Outbox
from twinflow.node.pulse import Pulse, SessionTimes, describe, listen
from twinflow.node.stream import calling
from twinflow.rpc.channel import open_channel
from twinflow.rpc.convert import error_from_pb
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as pb_grpc
from twinflow.transfer.base import PeerArena, PeerKey

log = logging.getLogger(__name__)

SessionKey = tuple[str, str]  # prefill worker id, incarnation


class Reader(Protocol):
    """The decode side of one hand-off. Called in the order of arrival, never after `failed` or the session's end."""

    id: str

    @property
    def arena(self) -> PeerArena | None:
        """What it reads from, once accepted: the peer's arena as of then."""
        ...

    def accepted(self, message: pb.Accepted) -> None: ...

    def announced(self, message: pb.Blocks) -> None: ...

    def first_token(self, message: pb.FirstToken) -> None: ...

    def finished(self, message: pb.Finished) -> None: ...

    def confirmed(self, message: pb.Confirmed) -> None: ...

    def failed(self, error: TwinflowError) -> None:
        """The peer gave it up or the session is lost; the session has already forgotten it."""
        ...


class Session:
    """Built by `Peers`, usable after `connect`, over after `end`.

    `arena` is the peer's, of its newest transfer generation; `on_unused` is told of each older one once no hand-off reads
    from it any more, and of all when the session ends. `refused` says why nothing is read from this peer.
    """

    def __init__(
        self, key: SessionKey, address: str, own: Layout, incarnation: str, features: Iterable[str], times: SessionTimes,
        on_end: Callable[["Session"], None], on_unused: Callable[[PeerKey], None],
    ) -> None:  # fmt: skip
        self.key = key
        self.epoch = secrets.randbits(63) | 1
        self.arena: PeerArena | None = None
        self.features: frozenset[str] = frozenset()  # the peer's
        self.live = False
        self.refused = ""
        self.idle_since_s = asyncio.get_running_loop().time()
        self._address = address
        self._own = own
        self._incarnation = incarnation
        self._features = frozenset(features)
        self._times = times
        self._on_end = on_end
        self._on_unused = on_unused
        self._older: set[PeerKey] = set()
        self._credits: asyncio.Semaphore | None = None
        self._ended = 0  # hand-offs so far
        self._readers: dict[str, Reader] = {}
        self._outbox: Outbox[pb.HandoffRequest] = Outbox()
        self._task: asyncio.Task[None] | None = None

    @property
    def open_handoffs(self) -> int:
        return len(self._readers)

    async def connect(self) -> None:
        """Dials and exchanges hellos. Raises HandoffFailed (unreachable, restarted) or Incompatible (both layouts)."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(ready), name=f"session-{self.key[0]}")
        try:
            await asyncio.wait_for(ready, self._times.hello_s)
        except TimeoutError:
            self.end("")
            raise HandoffFailed(f"{self} gave no hello within {self._times.hello_s:g} s") from None

    @property
    def has_room(self) -> bool:
        """Whether a hand-off could be opened without waiting for another one to end."""
        return self._credits is None or not self._credits.locked()

    async def open(self, reader: Reader, message: pb.Open, wait_s: float) -> None:
        """Starts a hand-off, once the peer's credits allow one more; in order of arrival, however many are before it. Raises
        Overloaded when none ends within `wait_s`, HandoffFailed if the session is over."""
        if self._credits is not None:
            await self._take_credit(self._credits, wait_s)
        if not self.live:
            self._give_back()
            raise HandoffFailed(f"the session to {self} is over")
        self._readers[reader.id] = reader
        self._outbox.put(pb.HandoffRequest(open=message))

    async def _take_credit(self, credits: asyncio.Semaphore, wait_s: float) -> None:
        taking = asyncio.ensure_future(credits.acquire())  # one wait, so that it keeps its place
        try:
            while not taking.done():
                ended = self._ended
                await asyncio.wait([taking], timeout=wait_s)
                if not taking.done() and self._ended == ended:
                    raise Overloaded(
                        f"{self} lets this worker have {len(self._readers)} hand-offs open, and none ended within {wait_s:g} s"
                    )
        except BaseException:
            if not taking.cancel():
                self._give_back()
            raise

    def pulled(self, message: pb.Pulled) -> None:
        self._outbox.put(pb.HandoffRequest(pulled=message))

    def leave(self, request_id: str, *, finished: bool) -> None:
        """Forgets a hand-off and lets the peer end its lease: `finished` = all is had, else it stops computing. Idempotent."""
        if self.forget(request_id):
            done = pb.HandoffRequest(release=pb.Release(id=request_id))
            self._outbox.put(done if finished else pb.HandoffRequest(cancel=pb.Cancel(id=request_id)))

    def forget(self, request_id: str) -> bool:
        """The peer has ended it already; False if it was not known."""
        self.idle_since_s = asyncio.get_running_loop().time()
        known = self._readers.pop(request_id, None) is not None
        if known:
            self._give_back()
            self._drop_unused()
        return known

    def end(self, why: str) -> None:
        """Ends the stream; every hand-off in it fails with `why`. Idempotent."""
        self._outbox.close()
        if self._task is not None:
            self._task.cancel()
        self._lost(why)

    async def closed(self) -> None:
        """Waits until the stream is gone, after `end`."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, ready: "asyncio.Future[None]") -> None:
        why = "it was closed"
        try:
            async with (
                open_channel(self._address, self._times.hello_s) as channel,
                calling(pb_grpc.WorkerStub(channel).Handoff, self._outbox) as replies,
            ):
                self._outbox.put(pb.HandoffRequest(hello=self._hello()))
                self._greeted(await anext(replies))
                if not ready.done():
                    ready.set_result(None)
                why = await self._listen(replies)
        except (grpc.RpcError, StopAsyncIteration, TwinflowError, OSError, ValueError) as e:
            why = describe(e) if isinstance(e, grpc.RpcError) else str(e) or "it ended the stream"
            if not ready.done():
                ready.set_exception(e if isinstance(e, TwinflowError) else HandoffFailed(f"{self}: {why}"))
        finally:
            self._lost(why)

    async def _listen(self, replies: AsyncIterator[pb.HandoffReply]) -> str:
        pulse = Pulse(self._times, lambda n: self._outbox.put(pb.HandoffRequest(heartbeat=pb.Heartbeat(count=n))))
        log.info("session to prefill worker %s is open", self)
        return await listen(replies, self._handle, pulse, self._times)

    def _hello(self) -> pb.HandoffHello:
        return pb.HandoffHello(
            worker_id=self._own.worker,
            incarnation=self._incarnation,
            session_epoch=self.epoch,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            fingerprint=self._own.fingerprint,
            layout=self._own.description,
            features=sorted(self._features),
        )

    def _greeted(self, reply: pb.HandoffReply) -> None:
        """Checks the peer's hello. Raises HandoffFailed or Incompatible."""
        if reply.WhichOneof("message") != "hello":
            raise HandoffFailed(f"{self} did not begin with a hello")
        hello = reply.hello
        if hello.HasField("error"):
            raise error_from_pb(hello.error)
        if (hello.worker_id, hello.incarnation) != self.key:
            raise HandoffFailed(
                f"at {self._address} is worker {hello.worker_id} incarnation {hello.incarnation}, not {self}"
            )
        if hello.session_epoch != self.epoch:
            raise HandoffFailed(f"{self} echoed epoch {hello.session_epoch} instead of {self.epoch}")
        negotiate(str(self), hello.protocol_min, hello.protocol_max)
        same_layout(self._own, Layout(hello.worker_id, hello.fingerprint, hello.layout))
        same_verify(str(self), self._features, hello.features)
        self.features = frozenset(hello.features)
        self._credits = asyncio.Semaphore(hello.credits) if hello.credits else None
        self.arena, self.live = arena_of(self.key, hello.generation, hello.ranks), True

    def _handle(self, reply: pb.HandoffReply) -> None:
        kind = reply.WhichOneof("message")
        if kind in ("heartbeat", None) or not self.live:
            return
        message = getattr(reply, kind)
        if kind == "renewed":
            self._renewed(message)
            return
        reader = self._readers.get(getattr(message, "id", ""))
        if reader is None:
            log.debug("%s sent %s for a hand-off that is over", self, kind)
            return
        try:
            self._deliver(reader, kind, message)
        except TwinflowError as e:
            self._break(reader, e)
        except Exception as e:  # process edge: a defect ends one hand-off
            log.exception("%s of hand-off %s could not be handled", kind, reader.id)
            self._break(reader, Internal(f"{kind} of a hand-off could not be handled: {e}"))

    def _deliver(self, reader: Reader, kind: str, message: object) -> None:
        match message:
            case pb.Accepted():
                reader.accepted(message)
            case pb.Blocks():
                reader.announced(message)
            case pb.FirstToken():
                reader.first_token(message)
            case pb.Finished():
                reader.finished(message)
            case pb.Confirmed():
                reader.confirmed(message)
            case pb.Failed():
                self.forget(message.id)
                reader.failed(self._peer_error(error_from_pb(message.error)))
            case _:
                raise HandoffFailed(f"{self} sent an unexpected {kind}")

    def _renewed(self, message: pb.Renewed) -> None:
        """The peer's arena has a new agent. Hand-offs accepted from here on read through it."""
        assert self.arena is not None
        try:
            arena = arena_of(self.key, message.generation, message.ranks)
        except Incompatible as e:
            self.end(e.message)
            return
        log.info("%s has opened transfer generation %d", self, message.generation)
        if arena.key != self.arena.key:
            self._older.add(self.arena.key)
            self.arena = arena
            self._drop_unused()

    def _drop_unused(self) -> None:
        read = {r.arena.key for r in self._readers.values() if r.arena is not None}
        for key in self._older - read:
            self._older.discard(key)
            self._on_unused(key)

    def _give_back(self) -> None:
        self._ended += 1
        if self._credits is not None:
            self._credits.release()

    def _peer_error(self, error: TwinflowError) -> TwinflowError:
        """Says whose error it is; a defect over there is a failed hand-off here."""
        kind = HandoffFailed if isinstance(error, Internal) else type(error)
        return kind(f"prefill worker {self.key[0]}: {error.message}", param=error.param)

    def _break(self, reader: Reader, error: TwinflowError) -> None:
        self.leave(reader.id, finished=False)
        reader.failed(error)

    def _lost(self, why: str) -> None:
        was_live, self.live = self.live, False
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.failed(HandoffFailed(f"the session to prefill worker {self} was lost: {why}"))
            self._give_back()
        if was_live:
            log.info("session to prefill worker %s is over: %s", self, why)
        self._outbox.close()
        for key in (*self._older, *((self.arena.key,) if was_live and self.arena is not None else ())):
            self._on_unused(key)
        self._older.clear()
        self._on_end(self)

    def __str__(self) -> str:
        return f"{self.key[0]}/{self.key[1][:8]} at {self._address}"


def arena_of(key: SessionKey, generation: int, ranks: Sequence[pb.ArenaInfo]) -> PeerArena:
    """Raises Incompatible unless the peer is one rank with an arena."""
    if len(ranks) != 1:
        raise Incompatible(
            f"prefill worker {key[0]} lies on {len(ranks)} ranks, this worker on 1: blocks and states of unequal tensor-parallel "
            "sizes are not moved; run both with one rank"
        )
    a = ranks[0]
    return PeerArena(
        worker_id=key[0],
        incarnation=key[1],
        generation=generation,
        base_address=a.base_address,
        total_bytes=a.total_bytes,
        block_bytes=a.block_bytes,
        slot_bytes=a.slot_bytes,
        blocks=a.blocks,
        slots=a.slots,
        memory=a.memory,
        device_id=a.device_id,
        agent_name=a.agent_name,
        agent_metadata=a.agent_metadata,
    )
