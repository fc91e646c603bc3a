"""A client that leaves, past ASGI: whoever works for it is cancelled, and only then."""

import asyncio
import gc
import json
from types import SimpleNamespace

import pytest

from services.router.http.client import Client
from tests.router.conftest import running, until
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.errors import Cancelled


def client(gone: bool = False) -> Client:
    return Client(SimpleNamespace(disconnected=gone), set())  # type: ignore[arg-type]


async def test_it_leaves_amid_the_work():
    c = client()
    asyncio.get_running_loop().call_later(0.01, c.leave)
    with pytest.raises(Cancelled):
        async with c.cancels():
            await asyncio.sleep(60)
    await asyncio.sleep(0)  # nothing of it is left behind
    here = asyncio.current_task()
    assert here is not None and not here.cancelling() and not c._watchers


@pytest.mark.parametrize("waits", [False, True], ids=["at-once", "waits"])
async def test_it_had_left_before(waits):
    c, done = client(gone=True), list[int]()

    async def work() -> None:
        async with c.cancels():
            if waits:
                await asyncio.sleep(60)
            done.append(1)

    with pytest.raises(Cancelled):
        await work()
    await asyncio.sleep(0)
    here = asyncio.current_task()
    assert done == ([] if waits else [1])
    assert here is not None and not here.cancelling()


async def test_another_cancellation_is_none_of_its_own():
    c = client()

    async def work() -> None:
        async with c.cancels():
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def request(path: str, body: dict) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: r\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("chars", [10, 300_000], ids=["short", "long"])  # the server pauses its reading after 64 KiB
@pytest.mark.parametrize("begun", [False, True], ids=["waiting", "begun"])
async def test_leaving_cancels_at_the_worker(model_folder, caplog, stream, chars, begun):
    async with running(model_folder) as c:
        worker = await c.add(FakeWorker("toy", max_model_tokens=1 << 20, max_request_tokens=1 << 20))
        worker.delay_s, worker.gate = 0.05, None if begun else asyncio.Event()
        prompt = [c.encode("a")[0]] * (chars // 5)
        body = {"model": "toy", "prompt": prompt, "max_tokens": 1000, "stream": stream}
        reader, writer = await asyncio.open_connection(*c.router.http_address.split(":"))
        writer.write(request("/v1/completions", body))
        await until(lambda: bool(worker.submits))
        if begun and stream:
            await reader.readuntil(b"data: ")
        else:
            await asyncio.sleep(0.2)
        writer.close()
        await until(lambda: bool(worker.cancels), within_s=5)
        await until(lambda: not c.router.generator.running)
        assert {w.active_requests for w in c.router.view.snapshot().workers} == {0}
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


async def test_two_requests_in_one_go_and_then_gone(model_folder, caplog):
    """Pipelined: the one that runs is not the last that was read."""
    async with running(model_folder) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.delay_s = 0.05
        one = request("/v1/completions", {"model": "toy", "prompt": "hello", "max_tokens": 1000, "stream": True})
        _, writer = await asyncio.open_connection(*c.router.http_address.split(":"))
        writer.write(one + one)
        await until(lambda: bool(worker.submits))
        writer.close()
        await until(lambda: bool(worker.cancels), within_s=5)
        await until(lambda: not c.router.generator.running)
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


async def test_a_request_leaves_nothing_to_the_collector(model_folder):
    """What holds itself is kept until it looks, the body too; and the longer a stream was, the later that is."""
    async with running(model_folder) as c:
        await c.add(FakeWorker("toy", "d0"))

        async def ask(path: str, **fields: object) -> None:
            body = {"model": "toy", "max_tokens": 4} | fields
            assert (await c.http.post(f"/{path}", json=body)).status_code in (200, 400)

        def kept() -> int:
            return sum(isinstance(o, Client) for o in gc.get_objects())

        await ask("v1/completions", prompt="hi", stream=True)
        gc.collect()
        gc.disable()
        try:
            before = kept()
            for _ in range(5):
                await ask("v1/completions", prompt="hi", stream=True)
                await ask("v1/completions", prompt="hi")
                await ask("v1/completions", prompt=[], stream=True)  # refused
                await ask("tokenize", prompt="hi")  # by the framework
            assert kept() <= before + 2, "but for the last one of a connection"
        finally:
            gc.enable()
