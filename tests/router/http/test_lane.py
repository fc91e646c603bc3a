"""The short way of a stream's tokens: the same events as the long one, and left wherever it does not fit."""

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from services.router.dispatch.stream import RequestStream
from services.router.http.client import CLIENT, Client
from services.router.http.events import Lane, StreamLimits, open_events
from tests.router.conftest import running, until
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.errors import NoCapacity
from twinflow.contracts.requests import FinishReason, Sample

TEXT = "naïve 😀 and 日本語, 👩‍👩‍👧 ok? " * 4


@pytest.fixture
def pushed(monkeypatch) -> list[str]:
    """Texts that went the short way."""
    texts: list[str] = []
    push = Lane.push

    def counting(self: Lane, text: str) -> None:
        texts.append(text)
        push(self, text)

    monkeypatch.setattr(Lane, "push", counting)
    return texts


async def events(cluster, path: str, **fields: object) -> list[dict]:
    body = {"model": "toy", "stream": True, "max_tokens": 400} | fields
    body |= {"prompt": "hi"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    path = f"/v1/{path}" if path == "completions" else "/v1/chat/completions"
    answer = await cluster.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def shown(found: list[dict], index: int = 0) -> str:
    choices = [c for e in found for c in e["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


@pytest.mark.parametrize("columns", [False, True], ids=["outputs", "columns"])
@pytest.mark.parametrize("path", ["completions", "chat"])
async def test_the_same_events_either_way(cluster, pushed, monkeypatch, path, columns):
    worker = cluster.workers[0]
    worker.delay_s, worker.columns = 0.002, columns  # tokens come one by one
    ids = cluster.says(worker, TEXT)
    short = await events(cluster, path)
    assert shown(short) == TEXT
    assert sum(map(bool, pushed)) > len(ids) / 4, "most events went the short way"
    pushed.clear()
    monkeypatch.setattr(Lane, "ready", lambda self: False)
    long = await events(cluster, path)
    assert not pushed

    def told(found: list[dict]) -> list[object]:
        return [e["choices"] for e in found]

    assert told(short) == told(long)


@pytest.mark.parametrize(
    ("path", "fields"),
    [("completions", {"n": 2}), ("completions", {"stop": "ok"}), ("completions", {"logprobs": 1}), ("chat", {"logprobs": True})],
    ids=["n", "stop", "logprobs", "chat-logprobs"],
)  # fmt: skip
async def test_what_does_not_fit_goes_the_long_way(cluster, pushed, path, fields):
    worker = cluster.workers[0]
    worker.delay_s = 0.002
    cluster.says(worker, TEXT)
    found = await events(cluster, path, **fields)
    wanted = TEXT[: TEXT.index("ok")] if "stop" in fields else TEXT
    assert {shown(found, i) for i in range(fields.get("n", 1))} == {wanted}
    assert not pushed


async def test_usage_counts_what_went_the_short_way(cluster, pushed):
    worker = cluster.workers[0]
    worker.delay_s = 0.002
    ids = cluster.says(worker, TEXT)
    found = await events(cluster, "chat", stream_options={"include_usage": True})
    assert found[-1]["usage"]["completion_tokens"] == len(ids) and pushed


async def test_a_reply_goes_on_at_another_worker(model_folder, pushed):
    """What the client got the short way is what the next worker is told."""
    async with running(model_folder) as c:
        workers = [await c.add(FakeWorker("toy", f"d{i}")) for i in range(2)]
        for worker in workers:
            worker.delay_s, worker.die_after = 0.002, 40
            ids = c.says(worker, TEXT)
        task = asyncio.create_task(events(c, "completions"))
        await until(lambda: any(w.submits for w in workers))
        first = next(w for w in workers if w.submits)
        other = workers[1 - workers.index(first)]
        other.die_after = None
        assert shown(await task) == TEXT and pushed
        assert len(other.submits[0].forced) // 4 == 40 < len(ids)


async def test_only_a_taker_that_waits_is_passed_by():
    stream, taken = RequestStream("r", lambda: None, lambda: None, 100), list[int]()
    stream.shortcut = lambda id: id < 10 and not taken.append(id)
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.put_token(0)  # the first one is the taker's
    stream.put_token(1)  # so is what comes before it has looked
    assert [s.token_id for s in (await waiting).samples] == [0, 1] and not taken
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.put_token(2)
    stream.put_token(3)
    assert taken == [2, 3] and not waiting.done()
    stream.put_token(10)  # refused: the taker is woken
    stream.put_token(4)  # and what comes before it has looked is behind that
    assert [s.token_id for s in (await waiting).samples] == [10, 4]
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.put_token(5)
    stream.put([Sample(6, FinishReason.LENGTH)])
    batch = await waiting
    assert taken == [2, 3, 5] and [s.token_id for s in batch.samples] == [6] and batch.last


class Cycle(SimpleNamespace):
    """As much of uvicorn's as a `Client` uses."""

    def __init__(self) -> None:
        self.written = bytearray()
        transport = SimpleNamespace(write=self.written.extend)
        super().__init__(
            transport=transport, flow=SimpleNamespace(write_paused=False), default_headers=[(b"date", b"now")], keep_alive=True,
            disconnected=False, response_started=False, response_complete=False, chunked_encoding=None,
        )  # fmt: skip

    def take(self) -> bytes:
        taken = bytes(self.written)
        self.written.clear()
        return taken


async def opened(
    events: AsyncGenerator[bytes, None], limits: StreamLimits, cycle: Cycle, **more: Any
) -> list[dict[str, Any]]:
    """What goes through ASGI behind the beginning."""
    sent = list[dict[str, Any]]()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {CLIENT: Client(cycle, set())}  # type: ignore[arg-type]
    request = SimpleNamespace(scope=scope, receive=None)
    answer = await open_events(request, events, limits, lambda: {"x-request-id": "r"}, **more)  # type: ignore[arg-type]
    await answer(scope, None, send)  # type: ignore[arg-type]
    return sent


HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: now\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\nx-request-id: r\r\ntransfer-encoding: chunked\r\n\r\n"
)


async def test_an_answer_begins_in_the_turn_of_its_first_event():
    """With headers and event in one write. Every turn of a busy loop takes milliseconds."""
    ready, cycle = asyncio.Event(), Cycle()

    async def told() -> AsyncGenerator[bytes, None]:
        await ready.wait()
        yield b"data: 1\n\n"

    opening = asyncio.ensure_future(opened(told(), StreamLimits(60, 60), cycle))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not cycle.written
    ready.set()
    await asyncio.sleep(0)
    assert cycle.take() == HEAD + b"9\r\ndata: 1\n\n\r\n"
    assert [m.get("body") for m in await opening] == [b""]


@pytest.mark.parametrize("way", ["goes on", "fails", "breaks"])
async def test_a_client_that_waits_for_its_first_event_gets_comments(way):
    ready, cycle = asyncio.Event(), Cycle()
    held = True

    async def told() -> AsyncGenerator[bytes, None]:
        await ready.wait()
        if way == "fails":
            raise NoCapacity("nobody is left")
        if way == "breaks":
            raise KeyError("a bug")
        yield b"data: 1\n\n"

    opening = asyncio.ensure_future(opened(told(), StreamLimits(0.01, 60), cycle, held=lambda: held))
    await asyncio.sleep(0.05)
    assert not cycle.written, "one that may still be shed has no status yet"
    held = False
    await until(lambda: bytes(cycle.written).count(b": keep-alive") >= 3)
    assert bytes(cycle.written).startswith(HEAD + b"e\r\n: keep-alive\n\n\r\n" * 2)
    ready.set()
    first, *rest = [
        m["body"] for m in await opening if m["type"] == "http.response.body" and m["body"] != b": keep-alive\n\n"
    ]
    wanted = {"goes on": b"data: 1", "fails": b"nobody is left", "breaks": b"internal error"}
    assert wanted[way] in first and rest == [b""]


async def test_a_connection_that_is_full_begins_the_slow_way():
    cycle = Cycle()
    cycle.flow.write_paused = True

    async def told() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"

    sent = await opened(told(), StreamLimits(60, 60), cycle)
    assert not cycle.written and [m.get("body") for m in sent] == [None, b"data: 1\n\n", b""]
    assert (b"x-request-id", b"r") in sent[0]["headers"]
