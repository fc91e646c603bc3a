"""A router whose workers are found in a Redis that goes away and comes back while requests run."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.node.redis_server import PASSWORD, RedisServer
from tests.router.conftest import Cluster, running, until
from tests.router.fake_worker import FakeWorker
from twinflow.node.registry.factory import RegistryKind, RegistrySettings, registration

TTL_S = 0.5


@pytest.fixture
async def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    monkeypatch.setenv("TWINFLOW_REDIS_URL", server.url)
    yield server
    server.kill()


class Registered:
    """A fake worker that registers in Redis."""

    def __init__(self, id: str, settings: RegistrySettings) -> None:
        self.worker = FakeWorker("toy", id=id)
        self._settings = settings
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.worker.start()
        made = registration(self._settings, (), lambda: self.worker.record)
        self._task = asyncio.create_task(made.run())

    async def leave(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def stop(self) -> None:
        await self.leave()
        await self.worker.stop()


def connected(cluster: Cluster, *workers: Registered) -> bool:
    return all(cluster.router.view.is_connected(w.worker.record.key) for w in workers)


async def test_requests_go_on_while_redis_is_away(model_folder: Path, redis: RedisServer, caplog) -> None:
    settings = RegistrySettings(RegistryKind.REDIS, redis_ttl_s=TTL_S)
    async with running(model_folder, registry=settings) as cluster:
        first, late = Registered("d0", settings), Registered("d1", settings)
        await first.start()
        await until(lambda: connected(cluster, first))
        assert (await cluster.complete(max_tokens=4)).status_code == 200

        first.worker.gate = asyncio.Event()
        across = asyncio.create_task(cluster.complete(max_tokens=4))
        await until(lambda: len(first.worker.submits) == 2)
        redis.kill()
        await asyncio.sleep(3 * TTL_S)
        first.worker.gate.set()
        assert (await across).status_code == 200
        assert (await cluster.complete(max_tokens=4)).status_code == 200
        assert "twinflow_router_registry_up 0.0" in (await cluster.http.get("/metrics")).text

        await late.start()
        redis.start()
        await until(lambda: connected(cluster, first, late))
        metrics = (await cluster.http.get("/metrics")).text
        assert "twinflow_router_registry_up 1.0" in metrics and "twinflow_router_registered_workers 2.0" in metrics
        await first.leave()
        await until(lambda: set(cluster.router.registry.records()) == {"d1"})
        assert (await cluster.complete(max_tokens=4)).status_code == 200
        for worker in (first, late):
            await worker.stop()
    assert PASSWORD not in caplog.text


async def test_a_worker_that_dies_is_removed_once_its_session_is_gone(model_folder: Path, redis: RedisServer) -> None:
    settings = RegistrySettings(RegistryKind.REDIS, redis_ttl_s=TTL_S)
    async with running(model_folder, registry=settings) as cluster:
        worker = Registered("d0", settings)
        await worker.start()
        await until(lambda: connected(cluster, worker))
        redis.kill()
        await worker.stop()
        await until(lambda: not connected(cluster, worker))
        assert set(cluster.router.registry.records()) == {"d0"}
        assert (await cluster.complete()).status_code == 503
        redis.start()
        await until(lambda: not cluster.router.registry.records())
