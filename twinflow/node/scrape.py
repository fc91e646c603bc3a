"""GET /metrics over plain HTTP/1.1, for a scraper: one answer per connection, on the process's own event loop."""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST

log = logging.getLogger(__name__)

REQUEST_S = 5.0  # for the request to arrive, and again for the answer to be taken
PATH = "/metrics"


class ScrapeServer:
    """`render` is called on the event loop at every scrape: milliseconds, no waiting."""

    def __init__(self, render: Callable[[], bytes]) -> None:
        self._render = render
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self.url = ""  # empty while nothing listens

    async def start(self, host: str, port: int) -> None:
        """0 asks for a free port. Raises OSError when it is taken."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=1 << 14)
        except OSError as e:
            raise OSError(f"cannot listen on {host}:{port} for metrics: {e.strerror or e}") from e
        bound = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound}{PATH}"

    async def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(self._answer(head))
            async with asyncio.timeout(REQUEST_S):
                await writer.drain()
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError) as e:
            log.debug("a scraper went away: %s", e)
        finally:
            self._answering.discard(task)
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        target = rest.split(b" ", 1)[0].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return answer(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET\n", "text/plain")
        if target != PATH.encode():
            return answer(HTTPStatus.NOT_FOUND, f"only {PATH}\n".encode(), "text/plain")
        try:
            body = self._render()
        except Exception:  # process edge: a defect costs this answer alone
            log.exception("metrics could not be rendered")
            return answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"see the log\n", "text/plain")
        return answer(HTTPStatus.OK, body, CONTENT_TYPE_LATEST, with_body=method == b"GET")


def answer(status: HTTPStatus, body: bytes, content_type: str, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
