"""The streams that routers hold to this worker (`Worker.Serve`): hello, requests in, one message per engine report out."""

import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from grpc import aio

from twinflow.contracts.errors import TwinflowError
from twinflow.contracts.events import EventColumns
from twinflow.contracts.workers import Load, WorkerRecord
from twinflow.engine.base import CacheSnapshot, Command, Resync
from twinflow.node.handshake import negotiate
from twinflow.node.outbox import Outbox
from twinflow.node.pulse import Pulse, SessionTimes, unhandled
from twinflow.node.stream import abort, converse, first_message
from twinflow.rpc.convert import error_to_pb, event_columns_to_pb, event_to_pb, load_to_pb, record_to_pb
from twinflow.rpc.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

PACE_EVERY_S = 0.25  # how often a router hears of steps that are of no other interest to it


class RouterStream:
    """One router's stream. Outputs gather, in the message that will carry them, until `flush`; after its end they go nowhere."""

    def __init__(
        self,
        router_id: str,
        outbox: Outbox[pb.WorkerMessage],
        load: Callable[[], Load],
        columns: bool = False,
        event_columns: bool = False,
    ) -> None:
        """`columns`: the router reads tokens in columns, which cost both sides a fraction of an output each. `event_columns`:
        and cache events, which cost them hardly anything so."""
        self.router_id = router_id
        self.event_columns = event_columns
        self._outbox = outbox
        self._message = pb.WorkerMessage()
        self._columns = columns
        self._told: set[str] = set()  # requests with an output in the message
        self._load = load
        self._load_sent: Load | None = None
        self._pace_due_s = 0.0

    def add(self, output: pb.Output) -> None:
        self._told.add(output.id)
        self._message.step.outputs.append(output)

    def add_token(self, request_id: str, token_id: int) -> None:
        """The next token of a request that goes on."""
        step = self._message.step
        if self._columns and request_id not in self._told:
            step.token_requests.append(request_id)
            step.token_ids.append(token_id)
            return
        output = step.outputs.add()
        output.id = request_id
        output.samples.add().token_id = token_id

    def fail(self, request_id: str, error: TwinflowError) -> None:
        """The terminal output of a request that was not even started."""
        self.add(pb.Output(id=request_id, error=error_to_pb(error)))
        self.flush()

    def flush(self, told: pb.StepReport | None = None) -> None:
        """Sends what gathered, `told` (cache events, in the form that the router reads) and the load as one message; nothing if
        nothing is new."""
        load = self._load()
        now, sent = time.monotonic(), self._load_sent
        paced = sent is None or load != sent or (load.pace != sent.pace and now > self._pace_due_s)
        step = self._message.step
        if step.outputs or step.token_ids or told is not None or paced:
            self._pace_due_s = now + PACE_EVERY_S
            if told is not None:
                step.MergeFrom(told)
            step.load.CopyFrom(load_to_pb(load))
            self._outbox.put(self._message)
            self._message, self._load_sent = pb.WorkerMessage(), load
            self._told.clear()

    def beat(self, engine_silent_s: float, count: int = 0) -> None:
        self._outbox.put(pb.WorkerMessage(heartbeat=pb.Heartbeat(count=count, engine_silent_s=engine_silent_s)))

    def send_snapshot(self, snapshot: pb.Snapshot) -> None:
        self._outbox.put(pb.WorkerMessage(snapshot=snapshot))

    def close(self) -> None:
        self._outbox.close()


class Submissions(Protocol):
    """What a role does with requests. Called in order, must not block; may raise TwinflowError."""

    def submit(self, stream: RouterStream, message: pb.Submit) -> None:
        """Starts a request, or raises: then that is its terminal output."""
        ...

    def cancel(self, stream: RouterStream, request_id: str) -> None:
        """Unknown ids are ignored."""
        ...

    def stream_ended(self, stream: RouterStream) -> None:
        """Cancels everything that was submitted on it."""
        ...


class RouterStreams:
    """All of them, in one worker."""

    def __init__(
        self,
        record: Callable[[], WorkerRecord],
        send: Callable[[Command], None],
        times: SessionTimes,
        engine_silent_s: Callable[[], float],
    ) -> None:
        self._record = record
        self._send = send
        self._times = times
        self._engine_silent_s = engine_silent_s
        self._streams: list[RouterStream] = []
        self._resyncs: dict[int, RouterStream] = {}  # token → who asked
        self._tokens = 0

    @property
    def connected(self) -> int:
        """Routers with a stream."""
        return len(self._streams)

    async def serve(
        self,
        messages: AsyncIterator[pb.RouterMessage],
        context: "aio.ServicerContext[Any, Any]",
        submissions: Submissions,
    ) -> None:
        """The whole life of one stream."""
        messages = aiter(messages)
        try:
            hello = (await first_message(messages, self._times)).hello
            protocol = negotiate(f"router {hello.router_id}", hello.protocol_min, hello.protocol_max)
        except TwinflowError as e:
            log.warning("a router was refused: %s", e.message)
            refusal = pb.WorkerHello(record=record_to_pb(self._record()), error=error_to_pb(e))
            await context.write(pb.WorkerMessage(hello=refusal))
            return await abort(context, e)
        outbox: Outbox[pb.WorkerMessage] = Outbox()
        outbox.put(pb.WorkerMessage(hello=pb.WorkerHello(record=record_to_pb(self._record()), protocol=protocol)))
        stream = RouterStream(hello.router_id, outbox, lambda: self._record().load, hello.columns, hello.event_columns)
        self._streams.append(stream)
        stream.flush()
        pulse = Pulse(self._times, lambda n: stream.beat(self._engine_silent_s(), n))
        log.info("router %s connected", hello.router_id)

        def ended(why: str) -> None:
            log.info("router %s is gone: %s", hello.router_id, why)
            self._streams.remove(stream)
            self._resyncs = {t: s for t, s in self._resyncs.items() if s is not stream}
            submissions.stream_ended(stream)

        await converse(
            context, messages, outbox, lambda m: self._handle(stream, m, submissions), pulse, self._times, ended
        )

    def _handle(self, stream: RouterStream, message: pb.RouterMessage, submissions: Submissions) -> None:
        match message.WhichOneof("message"):
            case "submit":
                try:
                    submissions.submit(stream, message.submit)
                except TwinflowError as e:
                    log.warning("request %s was refused: %s", message.submit.id, e.message)
                    stream.fail(message.submit.id, e)
                except Exception as e:  # process edge: what is wrong with one request costs the others nothing
                    log.exception("request %s could not be started", message.submit.id)
                    stream.fail(message.submit.id, unhandled("submit", e))
            case "cancel":
                submissions.cancel(stream, message.cancel.id)
            case "resync":
                self._tokens += 1
                self._resyncs[self._tokens] = stream
                self._send(Resync(self._tokens))
            case "heartbeat":
                pass
            case other:
                log.warning("router %s sent an unexpected %s", stream.router_id, other)

    def publish(self, events: EventColumns) -> None:
        """Everything of one engine report, one message per stream."""
        told = dict[bool, pb.StepReport]()
        for stream in self._streams:
            form = stream.event_columns
            if events and form not in told:
                told[form] = pb.StepReport(**_as_read(events, form))
            stream.flush(told.get(form))

    def beat(self) -> None:
        """Out of turn: what is told of the engine has changed."""
        for stream in self._streams:
            stream.beat(self._engine_silent_s())

    def snapshot(self, notice: CacheSnapshot) -> None:
        """Answers the router that asked; it may be gone."""
        stream = self._resyncs.pop(notice.token, None)
        if stream is not None:
            contents = _as_read(notice.events, stream.event_columns)
            stream.send_snapshot(pb.Snapshot(sequence=notice.sequence, **contents))

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def _as_read(events: EventColumns, columns: bool) -> dict[str, Any]:
    """Fields of a step or a snapshot, for a router that reads columns or not."""
    if columns:
        return {"event_columns": event_columns_to_pb(events)}
    return {"events": [event_to_pb(e) for e in events]}
