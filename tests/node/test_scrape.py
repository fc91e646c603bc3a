"""The scrape server over real sockets: what it answers, to whom it doesn't, and that nobody keeps it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from twinflow.node import scrape
from twinflow.node.scrape import ScrapeServer


@pytest.fixture
async def server() -> AsyncIterator[ScrapeServer]:
    server = ScrapeServer(lambda: b"# HELP x y\nx 1\n")
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()


async def ask(url: str, method: str = "GET") -> httpx.Response:
    async with httpx.AsyncClient(timeout=5) as http:
        return await http.request(method, url)


async def test_get_and_head(server: ScrapeServer) -> None:
    got, head = await ask(f"{server.url}?name[]=x"), await ask(server.url, "HEAD")
    assert (got.status_code, got.text) == (200, "# HELP x y\nx 1\n")
    assert got.headers["content-type"].startswith("text/plain; version=")
    assert (head.status_code, head.text, head.headers["content-length"]) == (200, "", "15")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("GET", "/metrics/x", 404), ("POST", "/metrics", 405)]
)
async def test_nothing_else(server: ScrapeServer, method: str, path: str, status: int) -> None:
    assert (await ask(server.url.replace("/metrics", path), method)).status_code == status


async def test_a_defect_costs_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    broken = ScrapeServer(lambda: b"" if caplog.text else 1 // 0)  # type: ignore[arg-type,return-value]
    await broken.start("127.0.0.1", 0)
    assert [(await ask(broken.url)).status_code for _ in range(2)] == [500, 200]
    assert "ZeroDivisionError" in caplog.text
    await broken.close()


async def test_who_says_nothing_or_too_much_is_dropped(server: ScrapeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "REQUEST_S", 0.2)
    port = int(server.url.split(":")[2].split("/")[0])
    for said in (b"", b"GET /metrics HTTP/1.1\r\n", b"GET " + b"x" * 100_000):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    assert (await ask(server.url)).status_code == 200


async def test_a_taken_port_is_an_error(server: ScrapeServer) -> None:
    port = int(server.url.split(":")[2].split("/")[0])
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} for metrics"):
        await ScrapeServer(bytes).start("127.0.0.1", port)


async def test_close_does_not_wait_for_anybody() -> None:
    server = ScrapeServer(bytes)
    await server.start("127.0.0.1", 0)
    port = int(server.url.split(":")[2].split("/")[0])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.sleep(0.05)
    async with asyncio.timeout(20):
        await server.close()
    await server.close()
    writer.close()
