"""What the way past the framework, and writing by hand, must not change."""

import asyncio
import json
import socket

import pytest
import uvloop

from services.router.dispatch.stream import RequestStream
from services.router.front import listen
from services.router.http.events import EventFrame, event
from tests.router.conftest import running, until
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.errors import NoCapacity
from twinflow.contracts.requests import FinishReason, Sample


@pytest.mark.parametrize("text", ["plain", "", 'say "no"\\', "a\nb\tc\x00d\x1f", "é̂€😀\u2028", EventFrame.PLACE])
def test_a_frame_is_the_event_with_its_text(text):
    def payload(content: str) -> object:
        return {"id": "x", "choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}]}

    made = EventFrame(payload(EventFrame.PLACE)).event(text)
    assert made == event(payload(text))
    assert json.loads(made.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_small_writes_leave_at_once(loop, shared):
    """Without TCP_NODELAY a token may wait for the client's acknowledgement of the one before it: 40 ms."""

    async def check() -> list[int]:
        listeners, found = listen("127.0.0.1", 0, 2 if shared else 1), list[int]()

        class Server(asyncio.Protocol):
            def connection_made(self, transport):
                accepted = transport.get_extra_info("socket")
                found.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                transport.close()

        servers = [await asyncio.get_running_loop().create_server(Server, sock=s) for s in listeners]
        _, writer = await asyncio.open_connection(*listeners[0].getsockname())
        await until(lambda: bool(found))
        writer.close()
        await writer.wait_closed()
        for server in servers:
            server.close()
            await server.wait_closed()
        return found

    with asyncio.Runner(loop_factory=loop) as runner:
        assert all(runner.run(check()))


def test_a_taken_port_is_said_however_many_share_it():
    (taken,) = listen("127.0.0.1", 0)
    taken.listen()
    with taken:
        for count in (1, 2):
            with pytest.raises(OSError, match="cannot listen on"):
                listen("127.0.0.1", taken.getsockname()[1], count)
    shared = listen("127.0.0.1", 0, 2)
    with shared[0], shared[1], pytest.raises(OSError, match="cannot listen"):
        listen("127.0.0.1", shared[0].getsockname()[1], 2)


def stream_of(limit_tokens: int) -> RequestStream:
    return RequestStream("r", lambda: None, lambda: None, limit_tokens)


async def test_the_rest_of_a_reply_comes_at_once_and_has_no_limit():
    stream = stream_of(limit_tokens=4)
    stream.put([Sample(0)])
    assert [s.token_id for s in (await stream.take()).samples] == [0]
    rest = asyncio.create_task(stream.take_rest())
    for i in range(1, 20):
        await asyncio.sleep(0)
        assert not rest.done()
        stream.put([Sample(i)])
    stream.put([Sample(20, FinishReason.LENGTH)])
    batch = await rest
    assert [s.token_id for s in batch.samples] == list(range(1, 21))
    assert batch.last


async def test_what_came_before_an_error_is_taken_first():
    stream = stream_of(limit_tokens=100)
    rest = asyncio.create_task(stream.take_rest())
    await asyncio.sleep(0)
    stream.put([Sample(1), Sample(2)])
    stream.fail(NoCapacity("full"))
    batch = await rest
    assert [s.token_id for s in batch.samples] == [1, 2]
    assert not batch.last
    with pytest.raises(NoCapacity):
        await stream.take()


async def test_a_bug_in_a_generation_is_an_answer(model_folder, monkeypatch):
    async with running(model_folder) as c:
        await c.add(FakeWorker("toy"))

        monkeypatch.setattr(c.router.front.dispatcher, "submit", lambda *_: 1 / 0)
        answer = await c.complete()
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["x-request-id"]
        assert not c.router.generator.running
        assert {w.active_requests for w in c.router.view.snapshot().workers} == {0}


async def test_other_methods_and_paths_are_the_frameworks(cluster):
    assert (await cluster.http.get("/v1/chat/completions")).status_code == 405
    assert (await cluster.http.post("/v1/chat/completions/")).status_code in (307, 404)
    assert (await cluster.http.get("/docs")).status_code == 200
