"""A peer whose connections take half a second to begin, as on a loaded or far host, is reached by everybody who dials it: how
long connecting may take is the caller's to say."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator

import pytest

from services.router.dispatch.link import LinkSettings, WorkerLink
from services.router.view.view import View
from tests.chaos.proxy import slow_way
from tests.services.cluster import RouterClient, candidate, decode_front, prefill_front, submit, until
from tests.services.conftest import Pair
from tests.services.fake_engine import FakeEngine
from twinflow.node.pulse import SessionTimes
from twinflow.node.registry.direct import DirectRegistration, DirectRegistry
from twinflow.rpc.channel import bind, new_server, stop_server

CONNECT_S = 0.5
TIMES = SessionTimes(hello_s=20.0, open_s=20.0)


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


@contextlib.asynccontextmanager
async def ended(task: "asyncio.Task[None]") -> AsyncIterator[None]:
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_decode_worker_to_prefill_worker(opened: contextlib.AsyncExitStack) -> None:
    p, _ = await opened.enter_async_context(prefill_front(FakeEngine(usable=2), times=TIMES))
    d, _ = await opened.enter_async_context(decode_front(FakeEngine(hold_tokens=4), times=TIMES))
    router = RouterClient(d.address)
    opened.push_async_callback(router.close)
    far = candidate(p)
    far.addresses[:] = [await opened.enter_async_context(slow_way(port_of(p.address), CONNECT_S))]
    began = time.monotonic()
    router.submit(submit("a", far))
    last = await router.end_of("a", within_s=20.0)
    assert time.monotonic() - began > CONNECT_S, "it did not go that way"
    assert (last.error.reason, last.stats.route, last.stats.prefill_worker) == ("", "remote", "p0")


async def test_router_to_worker(
    pair: Pair, opened: contextlib.AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    record = pair.d.record()
    way = await opened.enter_async_context(slow_way(port_of(pair.d.address), CONNECT_S))
    link = WorkerLink(dataclasses.replace(record, addresses=(way,)), View(), LinkSettings(times=TIMES))
    async with ended(asyncio.create_task(link.run())):
        await until(lambda: link.connected, within_s=20.0)
    assert "no session" not in caplog.text, "it took more than one attempt"


async def test_worker_to_registry(
    pair: Pair, opened: contextlib.AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    registry, server = DirectRegistry(), new_server()
    registry.add_to(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    opened.push_async_callback(stop_server, server, 0)
    registration = DirectRegistration(await opened.enter_async_context(slow_way(port, CONNECT_S)), pair.d.record)
    async with ended(asyncio.create_task(registration.run())):
        await until(lambda: registration.registered, within_s=20.0)
    assert "not registered" not in caplog.text, "it took more than one attempt"
