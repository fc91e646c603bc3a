"""Server-sent events that notice everything: a client that leaves, one that does not read, a worker that is silent.

`open_events` waits for the first event, so that an early error still gets its own HTTP status; when nothing has come
after the keep-alive time, the stream begins with a comment instead.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.router.http.errors import error_body
from twinflow.contracts.errors import Cancelled, Internal, TwinflowError

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
Events = AsyncGenerator[bytes, None]


@dataclass(frozen=True, slots=True)
class StreamLimits:
    keep_alive_s: float
    slow_client_s: float


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """One with its type as the event's name."""
    return b"event: " + payload["type"].encode() + b"\n" + event(payload)


async def gone(receive: Receive) -> None:
    """Returns when the client has left. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result; cancels it and raises Cancelled as soon as the client leaves."""
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
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def open_events(
    request: Request,
    events: Events,
    limits: StreamLimits,
    headers: Callable[[], dict[str, str]],
    held: Callable[[], bool] = lambda: False,
) -> Response:
    """Raises what the events raise before their first one. `headers` are asked for when the stream opens; it does not while the
    request is `held`, so that being shed has its own status however long it took."""
    first = asyncio.ensure_future(anext(events))
    left = asyncio.ensure_future(gone(request.receive))
    opened = False
    try:
        while True:
            await asyncio.wait({first, left}, timeout=limits.keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
            if first.done() or left.done() or not held():
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


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[bytes],
        left: asyncio.Future[None],
        events: Events,
        limits: StreamLimits,
        headers: dict[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._first = first
        self._left = left
        self._events = events
        self._limits = limits
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        try:
            await asyncio.wait({writing, self._left}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await cancel_all(writing, self._left, self._first)
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pending = self._first
        try:
            while True:
                await asyncio.wait({pending}, timeout=self._limits.keep_alive_s)
                if not pending.done():
                    await self._send(send, KEEP_ALIVE)
                    continue
                await self._send(send, pending.result())
                pending = self._first = asyncio.ensure_future(anext(self._events))
        except StopAsyncIteration:
            await self._send(send, b"", more=False)
        except _NotReading:
            log.warning("dropped a client that did not read for %s s", self._limits.slow_client_s)
        except Exception as e:  # the edge: a stream never ends silently
            if not isinstance(e, TwinflowError):
                log.exception("a stream failed")
                e = Internal("internal error; the router's log has the details")
            with suppress(_NotReading):
                await self._send(send, event(error_body(e)))
                await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": more}
        try:
            async with asyncio.timeout(self._limits.slow_client_s):
                await send(message)
        except TimeoutError:
            raise _NotReading from None


class _NotReading(Exception):
    """A write was blocked for too long. Returning without an end makes the server close the connection."""
