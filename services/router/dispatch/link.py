"""The session with one worker incarnation: dial, hello, submit and cancel, demultiplex reports, notice its loss.

A decode worker gets requests; a prefill worker only reports its load and cache events. Whatever ends a session (the
stream's end, an error, 3 s without any message, one that cannot be handled) fails its requests; the link dials again while the
worker is registered.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from copy import copy
from dataclasses import dataclass, field

from grpc import aio

from services.router.dispatch.base import Key, WorkerLost
from services.router.dispatch.reports import Reports
from services.router.dispatch.stream import BUFFER_TOKENS, RequestStream
from services.router.view.view import View
from twinflow.contracts.errors import HandoffFailed, Incompatible, TwinflowError
from twinflow.contracts.workers import WorkerRecord
from twinflow.node.handshake import PROTOCOL_MAX, PROTOCOL_MIN
from twinflow.node.outbox import Outbox
from twinflow.node.pulse import Pulse, SessionTimes, describe, listen
from twinflow.node.stream import calling, end_if_cancelled
from twinflow.rpc import convert
from twinflow.rpc.channel import open_channel
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as rpc

log = logging.getLogger(__name__)

MAX_PAUSE_S = 2.0  # between dials
VIEW_WAIT_S = 0.002  # tokens of the same message are out by then; the events of a long prompt take a millisecond

Out = Outbox[pb.RouterMessage]
Messages = AsyncIterator[pb.WorkerMessage]


@dataclass(frozen=True, slots=True)
class LinkSettings:
    router_id: str = "router"
    times: SessionTimes = field(default_factory=SessionTimes)
    buffer_tokens: int = BUFFER_TOKENS  # per request, between worker and client
    events: bool = True  # what workers hold is followed in the view


class WorkerLink:
    """`run` keeps the session up until cancelled; the rest is called from the same event loop."""

    def __init__(self, record: WorkerRecord, view: View, settings: LinkSettings) -> None:
        self.record = record
        self._view = view
        self._settings = settings
        self._streams: dict[str, RequestStream] = {}
        self._reports = Reports(record, view, self._streams, self.resync, settings.events, _soon)
        self._out: Out | None = None  # None while there is no session

    @property
    def connected(self) -> bool:
        return self._out is not None

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    def submit(self, message: pb.RouterMessage, prefill: Key | None) -> RequestStream:
        """As `Dispatcher.submit`. Raises WorkerLost when there is no session right now."""
        if self._out is None:
            raise WorkerLost(f"worker {self.record.id} is not connected")
        id = message.submit.id
        stream = RequestStream(
            id, lambda: self._cancel(id), lambda: self._forget(id), self._settings.buffer_tokens, prefill
        )
        self._streams[id] = stream
        self._send(message)
        return stream

    def resync(self) -> None:
        """Asks for all of the worker's cache contents."""
        if self._settings.events:
            self._send(pb.RouterMessage(resync=pb.Resync()))

    def give_up(self, error: WorkerLost, prefill: Key | None = None) -> None:
        """Fails all requests, or those that may still wait for something from this prefill worker: a first token comes before the
        rest of the prompt has been read."""
        for stream in list(self._streams.values()):
            if prefill is None or (stream.prefill == prefill and not stream.went_on):
                stream.cancel()
                stream.fail(copy(error))  # one that many tasks raise holds what all of them ran

    async def run(self) -> None:
        pause_s, last_problem = 0.1, ""
        while True:
            problem, was_up = await self._dial()
            end_if_cancelled()
            self.give_up(WorkerLost(f"decode worker {self.record.id} was lost: {problem}"))
            if was_up or problem != last_problem:
                log.warning("no session with worker %s at %s: %s", self.record.id, self.record.addresses[0], problem)
            pause_s = 0.1 if was_up else min(2 * pause_s, MAX_PAUSE_S)
            last_problem = problem
            await asyncio.sleep(pause_s)

    # ---- one session ----

    async def _dial(self) -> tuple[str, bool]:
        """Returns why the session ended and whether it was up and in good order until then."""
        channel = open_channel(self.record.addresses[0], self._settings.times.hello_s)
        out: Out = Outbox()
        try:
            async with calling(rpc.WorkerStub(channel).Serve, out) as messages:
                async with asyncio.timeout(self._settings.times.hello_s):
                    await self._greet(out, messages)
                return await self._session(out, messages), True
        except TimeoutError:
            return f"no hello within {self._settings.times.hello_s:g} s", False
        except StopAsyncIteration:
            return "it ended the stream before its hello", False
        except TwinflowError as e:
            return e.message, False
        except aio.AioRpcError as e:
            return describe(e), False
        finally:
            await channel.close(None)

    async def _greet(self, out: Out, messages: Messages) -> None:
        router = self._settings.router_id
        hello = pb.RouterHello(
            router_id=router, protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, columns=True, event_columns=True
        )
        out.put(pb.RouterMessage(hello=hello))
        first = await anext(messages)
        if first.WhichOneof("message") != "hello":
            raise HandoffFailed(f"the worker's first message is {first.WhichOneof('message')}, not its hello")
        if first.hello.protocol == 0:
            raise convert.error_from_pb(first.hello.error)
        record = convert.record_from_pb(first.hello.record)
        if record.key != self.record.key:
            raise Incompatible(f"expected {self.record.key} at {self.record.addresses[0]}, found {record.key}")

    async def _session(self, out: Out, messages: Messages) -> str:
        self._out = out
        self._view.set_connected(self.record.key, True)
        self.resync()
        log.info("session with worker %s (%s) is up", self.record.id, self.record.role.value)
        times = self._settings.times
        pulse = Pulse(times, lambda n: out.put(pb.RouterMessage(heartbeat=pb.Heartbeat(count=n))))
        try:
            return await listen(messages, self._reports.handle, pulse, times)
        finally:
            self._out = None
            self._reports.catch_up()
            self._view.set_connected(self.record.key, False)

    def _send(self, message: pb.RouterMessage) -> None:
        if self._out is not None:
            self._out.put(message)

    def _cancel(self, id: str) -> None:
        self._send(pb.RouterMessage(cancel=pb.Cancel(id=id)))

    def _forget(self, id: str) -> None:
        self._streams.pop(id, None)


def _soon(work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(VIEW_WAIT_S, work)
