"""The direct registry over real sockets: join, load updates, silence, restart, refusal, a router that comes back."""

import asyncio
import dataclasses
import time

import pytest

from twinflow.contracts.workers import Load, Role, WorkerRecord
from twinflow.node.registry.base import ChangeKind
from twinflow.node.registry.direct import DirectRegistration, DirectRegistry
from twinflow.node.registry.memory import MemoryRegistry
from twinflow.rpc import channel
from twinflow.rpc.convert import record_to_pb
from twinflow.rpc.v1 import engine_pb2_grpc as rpc

RECORD = WorkerRecord("w0", "i1", Role.DECODE, ("127.0.0.1:1",), "m", "f", 4096, 2048, 64)


async def serve(registry: DirectRegistry, port: int = 0):
    server = channel.new_server()
    rpc.add_RegistryServicer_to_server(registry, server)
    port = channel.bind(server, "127.0.0.1", port)
    await server.start()
    return server, port


async def until(condition, within_s: float = 5.0):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def stop(*tasks: asyncio.Task):
    for t in tasks:
        t.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_memory_tells_every_watcher_everything_in_order():
    async def scenario():
        registry = MemoryRegistry()
        registry.put(RECORD)
        seen = []

        async def watch():
            async for change in registry.watch():
                seen.append((change.kind, change.record.incarnation))

        task = asyncio.create_task(watch())
        await until(lambda: seen)
        registry.put(RECORD)  # no difference, no news
        registry.put(dataclasses.replace(RECORD, draining=True))
        registry.put(dataclasses.replace(RECORD, incarnation="i2"))
        registry.remove(RECORD)  # an old incarnation: ignored
        await until(lambda: len(seen) == 4)
        await stop(task)
        return seen

    joined, updated, left = ChangeKind.JOINED, ChangeKind.UPDATED, ChangeKind.LEFT
    assert asyncio.run(scenario()) == [(joined, "i1"), (updated, "i1"), (left, "i1"), (joined, "i2")]


def test_worker_joins_updates_and_leaves():
    async def scenario():
        registry = DirectRegistry()
        server, port = await serve(registry)
        load = [Load(running=1)]
        registration = DirectRegistration(
            f"127.0.0.1:{port}", lambda: dataclasses.replace(RECORD, load=load[0]), interval_s=0.05
        )
        task = asyncio.create_task(registration.run())
        await until(lambda: registration.registered and registry.records()["w0"].load.running == 1)
        load[0] = Load(running=9)
        await until(lambda: registry.records()["w0"].load.running == 9)
        await stop(task)
        await until(lambda: not registry.records(), within_s=1.0)
        await channel.stop_server(server, 0)

    asyncio.run(scenario())


def test_silence_removes_a_worker_whose_stream_stays_open():
    async def scenario():
        registry = DirectRegistry(silence_s=0.3)
        server, port = await serve(registry)
        ch = channel.open_channel(f"127.0.0.1:{port}", 5.0)
        call = rpc.RegistryStub(ch).Join()
        await call.write(record_to_pb(RECORD))
        await until(lambda: registry.records())
        await until(lambda: not registry.records(), within_s=2.0)
        await ch.close(None)
        await channel.stop_server(server, 0)

    asyncio.run(scenario())


def test_own_pause_is_not_the_workers_silence():
    """While this process is held up it hears nobody; whoever beats on is listed afterwards as if nothing had been."""

    async def scenario():
        registry, left = DirectRegistry(silence_s=0.3), list[str]()
        server, port = await serve(registry)
        registration = DirectRegistration(f"127.0.0.1:{port}", lambda: RECORD, interval_s=0.1)
        running = asyncio.create_task(registration.run())
        await until(lambda: registration.registered)

        async def watch():
            async for change in registry.watch():
                if change.kind is ChangeKind.LEFT:
                    left.append(change.record.id)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        for _ in range(3):
            time.sleep(0.8)  # noqa: ASYNC251
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert not left
        await stop(running)
        await until(lambda: left)
        await stop(watching)
        await channel.stop_server(server, 0)

    asyncio.run(scenario())


def test_a_restarted_worker_replaces_itself_and_a_double_is_refused(caplog):
    async def scenario():
        registry = DirectRegistry()
        server, port = await serve(registry)
        first = DirectRegistration(f"127.0.0.1:{port}", lambda: RECORD, interval_s=0.05)
        second = DirectRegistration(
            f"127.0.0.1:{port}", lambda: dataclasses.replace(RECORD, incarnation="i2"), interval_s=0.05, max_pause_s=0.2
        )
        one = asyncio.create_task(first.run())
        await until(lambda: first.registered)
        two = asyncio.create_task(second.run())
        await until(lambda: "taken by the live incarnation i1" in caplog.text)
        assert registry.records()["w0"].incarnation == "i1"
        await stop(one)
        await until(lambda: registry.records().get("w0") and registry.records()["w0"].incarnation == "i2")
        await stop(two)
        await channel.stop_server(server, 0)

    asyncio.run(scenario())


def test_a_router_that_restarts_finds_its_workers_again():
    async def scenario():
        server, port = await serve(DirectRegistry())
        registration = DirectRegistration(f"127.0.0.1:{port}", lambda: RECORD, interval_s=0.05, max_pause_s=0.2)
        task = asyncio.create_task(registration.run())
        await until(lambda: registration.registered)
        await channel.stop_server(server, 0)
        await until(lambda: not registration.registered)
        again = DirectRegistry()
        server, _ = await serve(again, port)
        await until(lambda: again.records())
        await stop(task)
        await channel.stop_server(server, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"id": ""}, "needs id"), ({"incarnation": ""}, "needs id"), ({"addresses": ()}, "needs id")],
    ids=["no-id", "no-incarnation", "no-addresses"],
)
def test_incomplete_records_are_refused(change, complaint):
    async def scenario():
        server, port = await serve(DirectRegistry())
        ch = channel.open_channel(f"127.0.0.1:{port}", 5.0)
        call = rpc.RegistryStub(ch).Join()
        await call.write(record_to_pb(dataclasses.replace(RECORD, **change)))
        reply = await call.read()
        await ch.close(None)
        await channel.stop_server(server, 0)
        return reply.error

    assert complaint in asyncio.run(scenario())
