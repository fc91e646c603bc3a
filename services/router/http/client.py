"""The client of one request, past ASGI: is it still there, does it read, and a write that needs no task.

ASGI tells of a client that leaves only to a task that waits for it, and takes every write through a coroutine. Both are too much
for a token. The server puts a `Client` into the scope of each request; under another server there is none, and the ways
through ASGI are taken.
"""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

CLIENT = "twinflow.client"  # in the scope


class Client:
    """Of one request. Made by `Connection`."""

    def __init__(self, cycle: RequestResponseCycle, watchers: set[Callable[[], object]]) -> None:
        self._cycle = cycle
        self._watchers = watchers

    @property
    def left(self) -> bool:
        return self._cycle.disconnected

    @property
    def free(self) -> bool:
        """A chunk of the body can be written at once: the headers are out, and what was written before is not too much unread."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete) and bool(
            cycle.chunked_encoding
        )

    def write_chunk(self, data: bytes) -> None:
        """Only while it is `free`; `data` is not empty."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    @property
    def body(self) -> bytes | None:
        """The request's, None while it is not all here."""
        return None if self._cycle.more_body else bytes(self._cycle.body)

    @contextmanager
    def watched(self, on_left: Callable[[], object]) -> Iterator[None]:
        """`on_left` is called once the client leaves meanwhile, or has left."""
        if self.left:
            on_left()
        self._watchers.add(on_left)
        try:
            yield
        finally:
            self._watchers.discard(on_left)


class Connection(HttpToolsProtocol):
    """uvicorn's, whose requests have their client in the scope."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watchers: set[Callable[[], object]] = set()

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.scope[CLIENT] = Client(self.cycle, self._watchers)  # type: ignore[typeddict-unknown-key]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for on_left in list(self._watchers):
            on_left()


def client_of(scope: MutableMapping[str, Any]) -> Client | None:
    found: Client | None = scope.get(CLIENT)
    return found
