"""The client of one request, past ASGI: is it still there, does it read, and a write that needs no task.

ASGI tells of a client that leaves only to a task that waits for it, and takes every write through a coroutine. Both are too much
for a token. The server puts a `Client` into the scope of each request; under another server there is none, and the ways
through ASGI are taken.
"""

import asyncio
from collections.abc import Iterable, MutableMapping
from types import TracebackType
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from twinflow.contracts.errors import Cancelled

CLIENT = "twinflow.client"  # in the scope
SIZES = tuple(b"%x\r\n" % size for size in range(1024))  # lines before most chunks


class Client:
    """Of one request. Made by `Connection`."""

    def __init__(self, cycle: RequestResponseCycle, watchers: set["Client"]) -> None:
        self._cycle = cycle
        self._watchers = watchers
        self._task: asyncio.Task[Any] | None = None
        self.left = False

    def free(self) -> bool:
        """A chunk of the body can be written at once: the headers are out, and what was written before is not too much unread."""
        cycle = self._cycle
        return not (self.left or cycle.flow.write_paused or cycle.response_complete) and cycle.chunked_encoding is True

    def write_chunk(self, data: bytes) -> None:
        """Only while it is `free`; `data` is not empty."""
        size = len(data)
        self._cycle.transport.write(b"".join((SIZES[size] if size < len(SIZES) else b"%x\r\n" % size, data, b"\r\n")))

    def may_begin(self) -> bool:
        """Nothing of the answer is out, and what was written before it is not too much unread."""
        cycle = self._cycle
        return not (self.left or cycle.disconnected or cycle.flow.write_paused or cycle.response_started)

    def begin(self, headers: Iterable[tuple[bytes, bytes]], data: bytes) -> None:
        """An answer of status 200 in chunks, the first one with its headers in one write; none yet where `data` is empty. Only
        while it `may_begin`; the headers must be clean."""
        cycle = self._cycle
        parts = self._head(headers)
        parts.append(
            b"transfer-encoding: chunked\r\n\r\n"
            if cycle.keep_alive
            else b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        if data:
            parts += (b"%x\r\n" % len(data), data, b"\r\n")
        cycle.response_started = cycle.chunked_encoding = True
        cycle.waiting_for_100_continue = False
        cycle.transport.write(b"".join(parts))

    def respond(self, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """A whole answer of status 200, in one write. Nothing may have been sent; the headers must be clean."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        parts = self._head(headers)
        parts.append(b"content-length: %d\r\n" % len(body))
        parts.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        parts.append(body)
        cycle.response_started = cycle.response_complete = True
        cycle.transport.write(b"".join(parts))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    def _head(self, headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        parts = [STATUS_LINE[200]]
        for name, value in (*self._cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        return parts

    def whole_body(self) -> bytes | None:
        """The request's, None while it is not all here."""
        if self._cycle.more_body:
            return None
        self._cycle.flow.resume_reading()  # the server pauses after much of it, and would not see the client leave
        return bytes(self._cycle.body)

    def cancels(self) -> "_Cancelling":
        """Whatever this task does inside is cancelled when the client leaves, or if it has left; then this raises Cancelled."""
        return _Cancelling(self)

    def watch(self) -> None:
        """From now on the current task is cancelled when the client leaves."""
        self._task = asyncio.current_task()
        self._watchers.add(self)
        if self._cycle.disconnected:
            self.leave()

    def unwatch(self) -> None:
        self._task = None
        self._watchers.discard(self)

    def leave(self) -> None:
        """The connection is lost. Cancels whoever is inside `cancels`."""
        self.left = True
        if self._task is not None:
            self._task.cancel()

    def uncancel(self) -> None:
        """The task has dealt with a cancellation of its own."""
        here = asyncio.current_task()
        assert here is not None
        here.uncancel()


class _Cancelling:
    """Of `Client.cancels`. Every request goes through it, and a generator in its place is one more that the loop keeps account
    of."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __aenter__(self) -> None:
        self._client.watch()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        client = self._client
        try:
            if error is None and client.left:  # and nothing inside had to wait since: the cancellation is still to come
                await asyncio.sleep(0)
        except asyncio.CancelledError as e:
            error = e
        finally:
            client.unwatch()
        if isinstance(error, asyncio.CancelledError) and client.left:
            client.uncancel()
            raise Cancelled("the client left") from None


class Connection(HttpToolsProtocol):
    """uvicorn's, whose requests have their client in the scope."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watchers: set[Client] = set()

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.scope[CLIENT] = Client(self.cycle, self._watchers)  # type: ignore[literal-required]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for client in list(self._watchers):
            client.leave()


def client_of(scope: MutableMapping[str, Any]) -> Client | None:
    found: Client | None = scope.get(CLIENT)
    return found


def forget_client(scope: MutableMapping[str, Any]) -> None:
    """Once the request is over: its client holds the scope, and what holds itself waits for the collector, the request's body and
    all."""
    scope.pop(CLIENT, None)
