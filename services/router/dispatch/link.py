"""The session with one worker incarnation: dial, hello, submit and cancel, demultiplex reports, notice its loss.

A decode worker gets requests; a prefill worker only reports its load and cache events. Whatever ends a session (the
stream's end, an error, 3 s without any message) fails its requests; the link dials again while the worker is
registered.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from grpc import aio

from services.router.dispatch.base import WorkerLost
from services.router.dispatch.stream import BUFFER_TOKENS, RequestStream
from services.router.view.view import View
from twinflow.contracts.errors import BadRequest, HandoffFailed, Incompatible, TwinflowError
from twinflow.contracts.workers import WorkerRecord
from twinflow.node.handshake import PROTOCOL_MAX, PROTOCOL_MIN
from twinflow.rpc import convert
from twinflow.rpc.channel import open_channel
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as rpc

log = logging.getLogger(__name__)

TICK_S = 0.25

Call = aio.StreamStreamCall
Messages = AsyncIterator[pb.WorkerMessage]


@dataclass(frozen=True, slots=True)
class LinkSettings:
    router_id: str = "router"
    hello_s: float = 5.0
    heartbeat_s: float = 0.5
    silence_s: float = 3.0  # without any message from the worker: lost
    buffer_tokens: int = BUFFER_TOKENS  # per request, between worker and client
    max_pause_s: float = 2.0  # between dials


class WorkerLink:
    """`run` keeps the session up until cancelled; the rest is called from the same event loop."""

    def __init__(self, record: WorkerRecord, view: View, settings: LinkSettings) -> None:
        self.record = record
        self._view = view
        self._settings = settings
        self._streams: dict[str, RequestStream] = {}
        self._out: asyncio.Queue[pb.RouterMessage] | None = None  # None while there is no session
        self._silent_ticks = 0

    @property
    def connected(self) -> bool:
        return self._out is not None

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    def submit(self, message: pb.Submit) -> RequestStream:
        """Raises WorkerLost when there is no session right now."""
        if self._out is None:
            raise WorkerLost(f"worker {self.record.id} is not connected")
        id = message.id
        stream = RequestStream(id, lambda: self._cancel(id), lambda: self._forget(id), self._settings.buffer_tokens)
        self._streams[id] = stream
        self._send(pb.RouterMessage(submit=message))
        return stream

    def resync(self) -> None:
        """Asks for all of the worker's cache contents."""
        self._send(pb.RouterMessage(resync=pb.Resync()))

    async def run(self) -> None:
        pause_s, last_problem = 0.1, ""
        while True:
            problem, was_up = await self._dial()
            for stream in list(self._streams.values()):
                stream.fail(WorkerLost(f"decode worker {self.record.id} was lost: {problem}"))
            if was_up or problem != last_problem:
                log.warning("no session with worker %s at %s: %s", self.record.id, self.record.addresses[0], problem)
            pause_s = 0.1 if was_up else min(2 * pause_s, self._settings.max_pause_s)
            last_problem = problem
            await asyncio.sleep(pause_s)

    # ---- one session ----

    async def _dial(self) -> tuple[str, bool]:
        """Returns why the session ended and whether it was ever up."""
        channel = open_channel(self.record.addresses[0])
        up = False
        try:
            call = rpc.WorkerStub(channel).Serve()
            try:
                messages = call.__aiter__()
                async with asyncio.timeout(self._settings.hello_s):
                    await self._greet(call, messages)
                up = True
                return await self._session(call, messages), up
            finally:
                call.cancel()
        except TimeoutError:
            return f"no hello within {self._settings.hello_s} s", up
        except StopAsyncIteration:
            return "the worker ended the stream before its hello", up
        except TwinflowError as e:
            return e.message, up
        except aio.AioRpcError as e:
            return f"{e.code().name}: {e.details()}", up
        finally:
            await channel.close(None)

    async def _greet(self, call: Call, messages: Messages) -> None:
        hello = pb.RouterHello(router_id=self._settings.router_id, protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX)
        await call.write(pb.RouterMessage(hello=hello))
        first = await anext(messages)
        if first.WhichOneof("message") != "hello":
            raise HandoffFailed(f"the worker's first message is {first.WhichOneof('message')}, not its hello")
        if first.hello.protocol == 0:
            raise convert.error_from_pb(first.hello.error)
        record = convert.record_from_pb(first.hello.record)
        if record.key != self.record.key:
            raise Incompatible(f"expected {self.record.key} at {self.record.addresses[0]}, found {record.key}")

    async def _session(self, call: Call, messages: Messages) -> str:
        self._out = asyncio.Queue()
        self._silent_ticks = 0
        self._view.set_connected(self.record.key, True)
        self.resync()
        log.info("session with worker %s (%s) is up", self.record.id, self.record.role.value)
        tasks = [
            asyncio.create_task(self._read(messages)),
            asyncio.create_task(self._write(call, self._out)),
            asyncio.create_task(self._pulse()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            self._out = None
            self._view.set_connected(self.record.key, False)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, messages: Messages) -> str:
        async for message in messages:
            self._silent_ticks = 0
            kind = message.WhichOneof("message")
            try:
                if kind == "step":
                    self._on_step(message.step)
                elif kind == "snapshot":
                    self._on_snapshot(message.snapshot)
            except BadRequest as e:  # a value of a newer release
                return f"cannot read the worker's {kind}: {e.message}"
        return "the worker ended the session"

    async def _write(self, call: Call, out: asyncio.Queue[pb.RouterMessage]) -> str:
        while True:
            await call.write(await out.get())

    async def _pulse(self) -> str:
        """Counts ticks, not clock time: when this process itself is held up, nobody is declared lost for it."""
        beats, ticks = 0, 0
        while True:
            await asyncio.sleep(TICK_S)
            ticks += 1
            self._silent_ticks += 1
            if self._silent_ticks * TICK_S > self._settings.silence_s:
                return f"nothing heard for {self._settings.silence_s} s"
            if ticks * TICK_S >= beats * self._settings.heartbeat_s:
                beats += 1
                self._send(pb.RouterMessage(heartbeat=pb.Heartbeat(count=beats)))

    # ---- messages ----

    def _on_step(self, step: pb.StepReport) -> None:
        for output in step.outputs:
            stream = self._streams.get(output.id)
            if stream is None:  # cancelled meanwhile
                continue
            stats = convert.stats_from_pb(output.stats) if output.HasField("stats") else None
            stream.put(convert.samples_from_pb(output.samples), stats)
            if output.HasField("error"):
                stream.fail(convert.error_from_pb(output.error))
        if step.HasField("load"):
            self._view.set_load(self.record.key, convert.load_from_pb(step.load))
        if step.events and self._view.apply(self.record.key, map(convert.event_from_pb, step.events)):
            log.info("cache events of worker %s have a gap: asking for a snapshot", self.record.id)
            self.resync()

    def _on_snapshot(self, snapshot: pb.Snapshot) -> None:
        events = map(convert.event_from_pb, snapshot.events)
        if self._view.replace(self.record.key, snapshot.sequence, events):
            self.resync()

    def _send(self, message: pb.RouterMessage) -> None:
        if self._out is not None:
            self._out.put_nowait(message)

    def _cancel(self, id: str) -> None:
        self._send(pb.RouterMessage(cancel=pb.Cancel(id=id)))

    def _forget(self, id: str) -> None:
        self._streams.pop(id, None)
