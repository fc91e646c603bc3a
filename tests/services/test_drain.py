"""SIGTERM: the worker is deregistered, takes nothing new, finishes what it has, outlives the leases it gave, leaves with 0."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from services.decode.config import DecodeConfig
from services.decode.rpc import DecodeRole
from services.prefill.config import PrefillConfig
from services.prefill.rpc import PrefillRole
from tests.services.cluster import TIMES, DecodeClient, RouterClient, candidate, open_message, submit, until
from tests.services.conftest import Pair
from tests.services.fake_engine import SLOT, FakeEngine
from twinflow.contracts.workers import Role
from twinflow.engine import leaving
from twinflow.engine.config import EngineConfig
from twinflow.engine.front import Front, run_front


class Process:
    """A worker run as its process runs it, in this one: signals reach it through the loop."""

    def __init__(self, config: Any, make: Callable[[Front], Any]) -> None:
        self.engine = FakeEngine()
        self.front: Front | None = None
        self.role: Any = None

        def keep(front: Front) -> Any:
            self.front, self.role = front, make(front)
            return self.role

        self.task = asyncio.create_task(run_front(config, self.engine, keep))

    async def up(self) -> None:
        await until(lambda: self.front is not None and self.front._reader is not None)
        await asyncio.sleep(0.05)

    def terminate(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def ended(self, within_s: float = 5.0) -> None:
        """Returned without an error: exit code 0."""
        await asyncio.wait_for(asyncio.shield(self.task), within_s)


Start = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    made: list[Process] = []

    async def begin(role: Role, **options: Any) -> Process:
        engine = EngineConfig("fake", f"{role.value}-x", "", role)
        if role is Role.PREFILL:
            p_config = PrefillConfig(engine=engine, session=TIMES, **options)
            process = Process(p_config, lambda front: PrefillRole(front, 8))
        else:
            d_config = DecodeConfig(engine=engine, session=TIMES, local_max_tokens=4, **options)
            process = Process(d_config, lambda front: DecodeRole(front, d_config))
        made.append(process)
        await process.up()
        return process

    yield begin
    for process in made:
        process.task.cancel()
        await asyncio.gather(process.task, return_exceptions=True)
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(sig)


async def test_a_prefill_worker_outlives_its_leases(start: Start, opened: AsyncExitStack) -> None:
    p = await start(Role.PREFILL)
    assert p.front is not None
    client = DecodeClient(p.front.address)
    opened.push_async_callback(client.close)
    client.open(open_message("a"))
    await client.wait("finished")
    p.terminate()
    await until(lambda: p.front.record().draining)
    client.open(open_message("b"))
    refused = await client.wait("failed")
    assert (refused.id, refused.error.reason) == ("b", "draining")
    await asyncio.sleep(0.3)
    assert not p.task.done(), "somebody may still read"
    client.pulled(
        id="a", lease_id=client.of("accepted")[0].lease_id, incarnation=p.front.incarnation, session_epoch=client.epoch,
        generation=3, blocks=[100, 101, 102], slots=[SLOT],
    )  # fmt: skip
    await client.wait("confirmed")
    await p.ended()
    assert p.engine.closed


async def test_a_decode_worker_finishes_its_requests(start: Start, pair: Pair, opened: AsyncExitStack) -> None:
    d = await start(Role.DECODE)
    assert d.front is not None
    router = RouterClient(d.front.address)
    opened.push_async_callback(router.close)
    d.engine.hold("pull")
    router.submit(submit("a", candidate(pair.p)))
    await until(lambda: "PrefillFinished" in d.engine.kinds("a"))
    d.terminate()
    await until(lambda: d.front.record().draining)
    router.submit(submit("b", candidate(pair.p)))
    assert (await router.end_of("b")).error.reason == "draining"
    assert not d.task.done()
    d.engine.go("pull")
    last = await router.end_of("a")
    assert (last.error.message, last.stats.route) == ("", "remote")
    await d.ended()
    await until(lambda: not len(pair.p_role.offers) and not pair.p_role.sessions)


async def test_nothing_to_wait_for(start: Start) -> None:
    p = await start(Role.PREFILL)
    p.terminate()
    await p.ended(within_s=3.0)


async def test_what_does_not_end_is_cut_off_after_its_time(start: Start, opened: AsyncExitStack) -> None:
    p = await start(Role.PREFILL, drain_s=0.4)
    assert p.front is not None
    client = DecodeClient(p.front.address)
    opened.push_async_callback(client.close)
    client.open(open_message("a"))
    await client.wait("finished")
    p.terminate()
    await p.ended()
    await until(lambda: client.ended is not None)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_a_second_signal_ends_it_at_once(start: Start, opened: AsyncExitStack, second: signal.Signals) -> None:
    p = await start(Role.PREFILL)
    assert p.front is not None
    client = DecodeClient(p.front.address)
    opened.push_async_callback(client.close)
    client.open(open_message("a"))
    await client.wait("finished")
    p.terminate()
    await asyncio.sleep(0.2)
    assert not p.task.done()
    os.kill(os.getpid(), second)
    await p.ended(within_s=3.0)


@pytest.mark.parametrize("look_every_s", [leaving.LOOK_EVERY_S, 0.0], ids=["seen-by-the-front", "seen-by-the-drain"])
async def test_an_engine_that_dies_while_draining_is_an_error(
    start: Start, opened: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, look_every_s: float
) -> None:
    monkeypatch.setattr(
        leaving, "LOOK_EVERY_S", look_every_s
    )  # a dead engine leaves nothing: a drain may see that first
    p = await start(Role.PREFILL)
    assert p.front is not None
    client = DecodeClient(p.front.address)
    opened.push_async_callback(client.close)
    client.open(open_message("a"))
    await client.wait("finished")
    p.terminate()
    await asyncio.sleep(0.1)
    p.engine.die()
    with pytest.raises(Exception, match="engine process died"):
        await p.ended()
