"""Server-sent events that notice everything: a client that leaves, one that does not read, a worker that is silent.

`open_events` waits for the first event, so that an early error still gets its own HTTP status; when nothing has come
after the keep-alive time, the stream begins with a comment instead.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.router.http.client import Client, client_of
from services.router.http.errors import error_body
from twinflow.contracts.errors import Cancelled, Internal, TwinflowError

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]
Events = AsyncGenerator[bytes, None]


@dataclass(frozen=True, slots=True)
class StreamLimits:
    keep_alive_s: float
    slow_client_s: float


def encoded(payload: Any) -> bytes:
    """JSON without spaces. What JSON has no number for is null in it."""
    return to_json(payload, inf_nan_mode="null")  # in a tenth of the time of Python's own


def event(payload: Any) -> bytes:
    return b"data: " + encoded(payload) + b"\n\n"


class EventFrame:
    """Events that differ in one text: encoded once, the text is put in between. `PLACE` marks it in the payload."""

    PLACE = "\0text"

    def __init__(self, payload: Any) -> None:
        self._before, self._after = event(payload).split(encoded(self.PLACE))

    def event(self, text: str) -> bytes:
        return b"".join((self._before, encode_basestring(text).encode(), self._after))


def named_event(payload: dict[str, Any]) -> bytes:
    """One with its type as the event's name."""
    return b"event: " + payload["type"].encode() + b"\n" + event(payload)


async def gone(receive: Receive) -> None:
    """Returns when the client has left. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Lane:
    """The short way of a stream's text: from the worker's message to the client's socket without a task's turn. Open while the
    stream has begun and its client reads; whatever does not fit in here goes the long way, which then is the only one."""

    def __init__(self, shape: Callable[[str], bytes | None]) -> None:
        """`shape`: the events that a piece of text becomes, if any."""
        self._shape = shape
        self._writer: _Writer | None = None

    def open(self, writer: "_Writer | None") -> None:
        self._writer = writer

    def ready(self) -> bool:
        writer = self._writer
        return writer is not None and writer.free()

    def push(self, text: str) -> None:
        """Only while it is ready."""
        data, writer = self._shape(text), self._writer
        if data is not None and writer is not None:
            writer.write_now(data)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result; cancels it and raises Cancelled as soon as the client leaves."""
    client = client_of(request.scope)
    if client is not None:
        async with client.cancels():
            return await work
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client left")
    finally:
        await cancel_all(task, left)


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Their errors count as seen. Nearly always they are over already, which then costs no turn of the loop."""
    running = [task for task in tasks if not task.done()]
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()
        task.cancel()
    if running:
        await asyncio.gather(*running, return_exceptions=True)


class _Opening:
    """Of a stream whose first event is waited for: after the keep-alive time the client gets headers and comments meanwhile."""

    def __init__(
        self, client: Client, limits: StreamLimits, headers: Callable[[], dict[str, str]], held: Callable[[], bool]
    ) -> None:
        self.begun = False
        self._client = client
        self._headers = headers
        self._held = held
        self._pause_s = limits.keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._pause_s, self._ring)

    def end(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        if self.begun:
            if self._client.free():
                self._client.write_chunk(KEEP_ALIVE)
        elif not self._held() and self._client.may_begin():
            self.begun = True
            self._client.begin(stream_headers(self._headers()), KEEP_ALIVE)
        self._timer = self._loop.call_later(self._pause_s, self._ring)


async def open_events(
    request: Request,
    events: Events,
    limits: StreamLimits,
    headers: Callable[[], dict[str, str]],
    held: Callable[[], bool] = lambda: False,
    lane: Lane | None = None,
) -> Response:
    """Raises what the events raise before their first one. `headers` are asked for when the stream opens; it does not while the
    request is `held`, so that being shed has its own status however long it took. `lane`: opened once the first event is out.

    The task that asks takes the first event itself: another one would cost two turns of the loop, in which others have theirs."""
    client = client_of(request.scope)
    if client is None:
        return await _open_through_asgi(request, events, limits, headers, held)
    opening, opened = _Opening(client, limits, headers, held), False
    try:
        try:
            async with client.cancels():
                first = await anext(events, b"")
        except Exception as e:
            if not opening.begun or client.left:
                raise
            first = failure(e)
        opened = True
        return EventStream(first, None, events, limits, headers() if not opening.begun else None, lane)
    finally:
        opening.end()
        if not opened:
            await events.aclose()


async def _open_through_asgi(
    request: Request,
    events: Events,
    limits: StreamLimits,
    headers: Callable[[], dict[str, str]],
    held: Callable[[], bool],
) -> Response:
    """Where the server is another one: tasks that wait for the event and for the client's leave."""
    first, left = asyncio.ensure_future(_next(events)), asyncio.ensure_future(gone(request.receive))
    opened = False
    try:
        while not first.done() and not left.done():
            await asyncio.wait({first, left}, timeout=limits.keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
            if not held():
                break
        if left.done() and not first.done():
            raise Cancelled("the client left")
        if first.done():
            first.result()
        opened = True
        return EventStream(first, left, events, limits, headers())
    finally:
        if not opened:
            await cancel_all(first, left)
            await events.aclose()


async def _next(events: Events) -> bytes:
    """b"" where there is none."""
    return await anext(events, b"")


def failure(error: Exception) -> bytes:
    """The last event of a stream that cannot go on: it never ends silently."""
    if not isinstance(error, TwinflowError):
        log.error("a stream failed", exc_info=error)
        error = Internal("internal error; the router's log has the details")
    return event(error_body(error))


def stream_headers(told: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return STREAM_HEADERS + [(name.encode("latin-1"), value.encode("latin-1")) for name, value in told.items()]


class Whole(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def __init__(self, payload: Any, headers: dict[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self.body = self._json = encoded(payload)
        self._told = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = client_of(scope)
        if client is None:
            self.init_headers(self._told)
            await super().__call__(scope, receive, send)
            return
        told = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._told.items()]
        client.respond([(b"content-type", b"application/json"), *told], self._json)


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes | asyncio.Future[bytes],
        left: asyncio.Future[None] | None,
        events: Events,
        limits: StreamLimits,
        headers: dict[str, str] | None,
        lane: Lane | None = None,
    ) -> None:
        """`first`: event, b"" where there is none. `left`: of the client, None where the scope has it. `headers`: None where they
        are out."""
        self.status_code = 200
        self.background = None
        self._first = first
        self._left = left
        self._events = events
        self._limits = limits
        self._lane = lane
        self._told = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = client_of(scope)
        try:
            if client is not None:
                with suppress(Cancelled):
                    async with client.cancels():
                        await self._write(send, client)
                return
            assert self._left is not None
            writing = asyncio.ensure_future(self._write(send, None))
            try:
                await asyncio.wait({writing, self._left}, return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    writing.result()
            finally:
                await cancel_all(writing, self._left)
        finally:
            if isinstance(self._first, asyncio.Future):
                await cancel_all(self._first)
            await self._events.aclose()

    async def _write(self, send: Send, client: Client | None) -> None:
        out = _Writer(send, self._limits, client)
        try:
            await self._begin(out, client)
            if self._lane is not None and client is not None:
                self._lane.open(out)
            async for data in self._events:
                await out.write(data)
            await out.end()
        except asyncio.CancelledError:
            if not out.dropped or (client is not None and client.left):
                raise
            if client is not None:
                client.uncancel()
            log.warning("dropped a client that did not read for %s s", self._limits.slow_client_s)
        except Exception as e:  # the edge
            await out.write(failure(e))
            await out.end()
        finally:
            if self._lane is not None:
                self._lane.open(None)
            await out.close()

    async def _begin(self, out: "_Writer", client: Client | None) -> None:
        """Headers and first event, in one write where nothing is in the way."""
        if self._told is not None:
            told = stream_headers(self._told)
            if client is not None and isinstance(self._first, bytes) and client.may_begin():
                client.begin(told, self._first)
                return
            await out.start(told)
        first = self._first if isinstance(self._first, bytes) else await self._first
        if first:
            await out.write(first)


class _Writer:
    """The way to one client, used by one task. Its timer is armed anew only when it rings, so that a token costs none: it sends
    a comment when nothing was written for long, and cancels the task when a write is blocked for too long. Returning without an
    end makes the server close the connection."""

    def __init__(self, send: Send, limits: StreamLimits, client: Client | None = None) -> None:
        self.dropped = False  # cancelled because the client does not read
        self._send = send
        self._client = client
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._task = asyncio.current_task()
        self._blocked = False  # inside a write
        self._since_s = self._loop.time()  # that is so
        self._comment: asyncio.Future[None] | None = None
        self._rings_s = min(limits.keep_alive_s, limits.slow_client_s)
        self._timer = self._loop.call_later(self._rings_s, self._ring)

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, body: bytes, more: bool = True) -> None:
        self._blocked, self._since_s = True, self._loop.time()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._blocked, self._since_s = False, self._loop.time()

    def free(self) -> bool:
        """`write_now` would not have to wait."""
        return not self._blocked and self._client is not None and self._client.free()

    def write_now(self, body: bytes) -> None:
        """Only while it is free."""
        assert self._client is not None
        self._client.write_chunk(body)
        self._since_s = self._now()

    async def end(self) -> None:
        await self.write(b"", more=False)

    async def close(self) -> None:
        self._timer.cancel()
        if self._comment is not None:
            await cancel_all(self._comment)

    def _ring(self) -> None:
        now = self._loop.time()
        limit_s = self._limits.slow_client_s if self._blocked else self._limits.keep_alive_s
        if now >= self._since_s + limit_s:
            if self._blocked:
                self._drop()
                return
            if self._comment is None or self._comment.done():
                message = {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                self._comment = asyncio.ensure_future(self._send(message))
            self._since_s = now
        self._timer = self._loop.call_at(min(self._since_s + limit_s, now + self._rings_s), self._ring)

    def _drop(self) -> None:
        if self._task is not None:
            self.dropped = self._task.cancel()
