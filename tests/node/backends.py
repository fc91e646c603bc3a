"""Every registry behind one face, so that the conformance suite asks all of them the same things."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any, Protocol

from tests.node.redis_server import RedisServer
from twinflow.contracts.workers import Role, WorkerRecord
from twinflow.node.registry.base import Change, Registry
from twinflow.node.registry.direct import DirectRegistration, DirectRegistry
from twinflow.node.registry.memory import MemoryRegistry
from twinflow.node.registry.redis import RedisRegistration, RedisRegistry
from twinflow.rpc import channel
from twinflow.rpc.convert import record_to_pb
from twinflow.rpc.v1 import engine_pb2_grpc as rpc

RECORD = WorkerRecord("w0", "i1", Role.DECODE, ("127.0.0.1:1",), "m", "f", 4096, 2048, 64)
TTL_S = 0.5


def record(id: str = "w0", incarnation: str = "i1", **fields: Any) -> WorkerRecord:
    return dataclasses.replace(RECORD, id=id, incarnation=incarnation, **fields)


async def until(condition, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def cancelled(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Worker:
    """A registered worker; `record` is what it says of itself from now on."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record

    def change(self, **fields: Any) -> None:
        self.record = dataclasses.replace(self.record, **fields)
        self.announce()

    def announce(self) -> None: ...

    async def leave(self) -> None: ...


class Registered(Worker):
    """Through the backend's own registration."""

    def __init__(self, record: WorkerRecord, registration: DirectRegistration | RedisRegistration) -> None:
        super().__init__(record)
        self.registration = registration
        self.task: asyncio.Task[None] | None = None

    def announce(self) -> None:
        self.registration.announce()

    async def leave(self) -> None:
        if self.task is not None:
            await cancelled(self.task)


class Watcher:
    """Lists the changes of one `watch` as (kind, incarnation)."""

    def __init__(self, registry: Registry) -> None:
        self.changes: list[Change] = []
        self._task = asyncio.create_task(self._watch(registry))

    async def _watch(self, registry: Registry) -> None:
        async for change in registry.watch():
            self.changes.append(change)

    @property
    def seen(self) -> list[tuple[str, str]]:
        return [(c.kind.value, c.record.incarnation) for c in self.changes]

    async def close(self) -> None:
        await cancelled(self._task)


class Backend(Protocol):
    """`routers` are two registries over the same workers."""

    routers: list[Any]

    async def open(self) -> None: ...

    async def join(self, record: WorkerRecord) -> Worker:
        """A worker that stays registered until it leaves."""
        ...

    async def say_once(self, record: WorkerRecord) -> None:
        """A worker that registers and then says nothing, not even goodbye."""
        ...

    async def restart(self) -> None:
        """What holds the registry ends without a goodbye and comes back with nothing; `routers` are those of after it."""
        ...

    async def close(self) -> None: ...


class MemoryBackend:
    def __init__(self) -> None:
        self.routers = [MemoryRegistry(), MemoryRegistry()]

    async def open(self) -> None: ...

    async def join(self, record: WorkerRecord) -> Worker:
        routers = self.routers

        class Put(Worker):
            def announce(self) -> None:
                for router in routers:
                    router.put(self.record)

            async def leave(self) -> None:
                for router in routers:
                    router.remove(self.record)

        worker = Put(record)
        worker.announce()
        return worker

    async def say_once(self, record: WorkerRecord) -> None:
        await self.join(record)

    async def close(self) -> None: ...


class DirectBackend:
    def __init__(self) -> None:
        self.routers: list[DirectRegistry] = []
        self._ports = [0, 0]
        self._servers: list[Any] = []
        self._workers: list[Registered] = []
        self._channels: list[Any] = []

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{p}" for p in self._ports]

    async def open(self) -> None:
        self.routers = [DirectRegistry(TTL_S), DirectRegistry(TTL_S)]
        for i, registry in enumerate(self.routers):
            server = channel.new_server()
            registry.add_to(server)
            self._ports[i] = channel.bind(server, "127.0.0.1", self._ports[i])
            await server.start()
            self._servers.append(server)

    async def join(self, record: WorkerRecord) -> Registered:
        registration = DirectRegistration(self.addresses, lambda: worker.record, interval_s=TTL_S / 5, max_pause_s=0.2)
        worker = Registered(record, registration)
        worker.task = asyncio.create_task(registration.run())
        self._workers.append(worker)
        return worker

    async def say_once(self, record: WorkerRecord) -> None:
        for address in self.addresses:
            self._channels.append(channel.open_channel(address, 5.0))
            call = rpc.RegistryStub(self._channels[-1]).Join()
            await call.write(record_to_pb(record))
            await call.read()

    async def restart(self) -> None:
        await self._stop()
        await self.open()

    async def close(self) -> None:
        for worker in self._workers:
            await worker.leave()
        await channel.close_channels(self._channels)
        await self._stop()

    async def _stop(self) -> None:
        for registry in self.routers:
            registry.close()
        for server in self._servers:
            await channel.stop_server(server, 0)
        self._servers = []


class RedisBackend:
    """`alive` are the worker incarnations that both routers have a session with."""

    def __init__(self, folder: Path) -> None:
        self.server = RedisServer(folder)
        self.routers: list[RedisRegistry] = []
        self.alive: set[tuple[str, str]] = set()
        self._running: list[asyncio.Task[None]] = []
        self._workers: list[Registered] = []
        self._silent: list[RedisRegistration] = []

    async def open(self) -> None:
        self.server.start()
        self.routers = [self.router(), self.router()]

    def router(self, prefix: str = "twinflow") -> RedisRegistry:
        registry = RedisRegistry(self.server.url, prefix, TTL_S, self.alive.__contains__)
        self._running.append(asyncio.create_task(registry.run()))
        return registry

    async def join(self, record: WorkerRecord, prefix: str = "twinflow") -> Registered:
        registration = RedisRegistration(self.server.url, prefix, TTL_S, lambda: worker.record)
        worker = Registered(record, registration)
        worker.task = asyncio.create_task(registration.run())
        self._workers.append(worker)
        return worker

    async def say_once(self, record: WorkerRecord) -> None:
        registration = RedisRegistration(self.server.url, "twinflow", TTL_S, lambda: record)
        self._silent.append(registration)
        await registration._beat()

    async def crash(self, worker: Registered) -> None:
        """The process is gone: no goodbye."""
        worker.registration._leave = nothing
        await worker.leave()

    async def restart(self) -> None:
        self.server.kill()
        self.server.start()

    async def close(self) -> None:
        for worker in self._workers:
            await worker.leave()
        for registration in self._silent:
            await registration._server.close()
        await cancelled(*self._running)
        self.server.kill()


async def nothing() -> None: ...
