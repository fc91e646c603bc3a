"""The gRPC face of a prefill worker: sessions of decode workers, and routers that watch its load and cache events."""

import logging
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from services.prefill.metrics import End
from services.prefill.offer import Replies, failed
from services.prefill.report import CREDITS, Handoffs, arena_info
from twinflow.contracts.errors import BadRequest, Draining, HandoffFailed, TwinflowError
from twinflow.engine.admin import AdminService
from twinflow.engine.front import Front
from twinflow.node.handshake import PROTOCOL_MAX, PROTOCOL_MIN, Layout, features, negotiate, same_layout
from twinflow.node.outbox import Outbox
from twinflow.node.pulse import Pulse
from twinflow.node.stream import abort, converse, first_message
from twinflow.rpc.convert import error_to_pb
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as pb_grpc
from twinflow.transfer.leases import SessionKey

log = logging.getLogger(__name__)

Context = aio.ServicerContext


class Servicer(pb_grpc.WorkerServicer):
    def __init__(self, front: Front, handoffs: Handoffs) -> None:
        self._front = front
        self._handoffs = handoffs

    async def Serve(self, request_iterator: AsyncIterator[pb.RouterMessage], context: "Context[Any, Any]") -> None:
        await self._front.routers.serve(request_iterator, context, self._handoffs)

    async def Handoff(self, request_iterator: AsyncIterator[pb.HandoffRequest], context: "Context[Any, Any]") -> None:
        messages = aiter(request_iterator)
        times = self._front.config.session
        hello = pb.HandoffHello()
        try:
            hello = (await first_message(messages, times)).hello
            session = self._check(hello)
            replies: Replies = Outbox()
            self._handoffs.session_opened(session, replies, hello.features)
        except TwinflowError as e:
            log.warning("a session of %s was refused: %s", hello.worker_id or "an unknown worker", e.message)
            await context.write(pb.HandoffReply(hello=self._hello(hello.session_epoch, e)))
            return await abort(context, e)
        log.info("session with decode worker %s, incarnation %s is open", session.worker_id, session.incarnation)
        replies.put(pb.HandoffReply(hello=self._hello(session.epoch)))
        pulse = Pulse(times, lambda n: replies.put(pb.HandoffReply(heartbeat=pb.Heartbeat(count=n))))
        await converse(
            context,
            messages,
            replies,
            lambda m: self._handle(session, replies, m),
            pulse,
            times,
            lambda why: self._handoffs.session_ended(session, why),
        )

    def _check(self, hello: pb.HandoffHello) -> SessionKey:
        """Raises Incompatible (both layouts) or BadRequest."""
        if not hello.worker_id or not hello.incarnation or not hello.session_epoch:
            raise BadRequest("a session's hello needs worker_id, incarnation and session_epoch")
        negotiate(f"decode worker {hello.worker_id}", hello.protocol_min, hello.protocol_max)
        same_layout(self._front.layout, Layout(hello.worker_id, hello.fingerprint, hello.layout))
        return SessionKey(hello.worker_id, hello.incarnation, hello.session_epoch)

    def _hello(self, epoch: int, error: TwinflowError | None = None) -> pb.HandoffHello:
        arena = self._handoffs.arena
        return pb.HandoffHello(
            worker_id=self._front.worker_id,
            incarnation=self._front.incarnation,
            session_epoch=epoch,
            generation=arena.generation,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            fingerprint=self._front.layout.fingerprint,
            layout=self._front.layout.description,
            ranks=[arena_info(arena)],
            features=features(verify=self._front.config.engine.verify == "checksum"),
            credits=self._handoffs.credits,
            error=error_to_pb(error) if error is not None else None,
        )

    def _handle(self, session: SessionKey, replies: Replies, message: pb.HandoffRequest) -> None:
        offers = self._handoffs.offers
        match message.WhichOneof("message"):
            case "open":
                self._open(session, replies, message.open)
            case "pulled":
                offers.pulled(session, replies, message.pulled)
            case "release":
                offers.leave(session, message.release.id, End.RELEASED)
            case "cancel":
                offers.leave(session, message.cancel.id, End.CANCELLED)
            case "heartbeat":
                pass
            case other:
                log.warning("decode worker %s sent an unexpected %s", session.worker_id, other)

    def _open(self, session: SessionKey, replies: Replies, message: pb.Open) -> None:
        """A defect here must not leave the reader waiting, nor cost the other hand-offs their session."""
        try:
            self._front.check_not_draining()
            self._handoffs.check_engine_heard()
            self._handoffs.offers.open(session, replies, message, self._handoffs.features_of(session))
        except (Draining, HandoffFailed) as e:
            self._handoffs.metrics.refused(e)
            replies.put(failed(message.id, e))
        except Exception:  # process edge
            log.exception("hand-off %s could not be opened", message.id)
            replies.put(failed(message.id, BadRequest("the hand-off could not be read")))


class PrefillRole(Handoffs):
    """`RoleService` and `AdminRole`: the hand-offs with their servicer."""

    def __init__(self, front: Front, max_open: int, credits: int = CREDITS) -> None:
        super().__init__(front, max_open, credits)
        self._servicer = Servicer(front, self)
        self._admin = AdminService(front, self)

    def add_to(self, server: aio.Server) -> None:
        pb_grpc.add_WorkerServicer_to_server(self._servicer, server)
        self._admin.add_to(server)
