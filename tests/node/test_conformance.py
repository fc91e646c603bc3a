"""What every registry does, asked of each: join, leave, silence, restart, two routers, watchers that come late."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.node.backends import (
    TTL_S,
    Backend,
    DirectBackend,
    MemoryBackend,
    RedisBackend,
    Watcher,
    record,
    until,
)
from twinflow.contracts.workers import Load, Role

ALL = ("memory", "direct", "redis")
REAL = ("direct", "redis")  # with somebody else on the other end, who can fall silent


@pytest.fixture
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    makers = {"memory": MemoryBackend, "direct": DirectBackend, "redis": lambda: RedisBackend(tmp_path)}
    backend = makers[request.param]()
    await backend.open()
    yield backend
    await backend.close()


def of(backends: tuple[str, ...]):
    return pytest.mark.parametrize("backend", backends, indirect=True)


def everywhere(backend: Backend, condition) -> bool:
    return all(condition(router.records()) for router in backend.routers)


@of(ALL)
async def test_a_worker_joins_as_it_described_itself(backend: Backend) -> None:
    worker = await backend.join(record(role=Role.PREFILL, addresses=("a:1", "b:2"), load=Load(3, 1, 512, 7, 8, 1, 2)))
    await until(lambda: everywhere(backend, lambda r: r == {"w0": worker.record}))


@of(ALL)
async def test_a_worker_that_leaves_is_gone_at_once(backend: Backend) -> None:
    worker, other = await backend.join(record()), await backend.join(record("w1"))
    await until(lambda: everywhere(backend, lambda r: len(r) == 2))
    await worker.leave()
    await until(lambda: everywhere(backend, lambda r: set(r) == {other.record.id}), within_s=0.8 * TTL_S)


@of(ALL)
async def test_load_and_draining_follow(backend: Backend) -> None:
    worker = await backend.join(record())
    watcher = Watcher(backend.routers[0])
    await until(lambda: watcher.seen == [("joined", "i1")])
    worker.change(load=Load(running=9))
    await until(lambda: everywhere(backend, lambda r: r["w0"].load.running == 9))
    worker.change(draining=True)
    await until(lambda: everywhere(backend, lambda r: r["w0"].draining), within_s=0.8 * TTL_S)
    worker.change(draining=False)
    await until(lambda: everywhere(backend, lambda r: not r["w0"].draining))
    await until(lambda: len(watcher.changes) >= 4)
    assert {kind for kind, _ in watcher.seen[1:]} == {"updated"}
    await watcher.close()


@of(REAL)
async def test_silence_removes_and_the_others_stay(backend: Backend) -> None:
    stays = await backend.join(record("w1"))
    await until(lambda: everywhere(backend, lambda r: set(r) == {"w1"}))
    await backend.say_once(record())
    await until(lambda: everywhere(backend, lambda r: set(r) == {"w0", "w1"}))
    await until(lambda: everywhere(backend, lambda r: set(r) == {stays.record.id}), within_s=6 * TTL_S)


@of(ALL)
async def test_a_new_incarnation_is_left_then_joined(backend: Backend) -> None:
    await backend.say_once(record())
    await until(lambda: everywhere(backend, lambda r: "w0" in r))
    watchers = [Watcher(router) for router in backend.routers]
    await until(lambda: all(w.seen for w in watchers))
    await backend.join(record(incarnation="i2", addresses=("127.0.0.1:2",)))
    await until(lambda: everywhere(backend, lambda r: r.get("w0", record()).incarnation == "i2"))
    for watcher in watchers:
        await until(lambda w=watcher: w.seen == [("joined", "i1"), ("left", "i1"), ("joined", "i2")])
        await watcher.close()


@of(ALL)
async def test_a_watcher_from_the_middle_sees_what_is_there_then_what_changes(backend: Backend) -> None:
    one, two = await backend.join(record()), await backend.join(record("w1", "j1"))
    await until(lambda: everywhere(backend, lambda r: len(r) == 2))
    await two.leave()
    await until(lambda: everywhere(backend, lambda r: len(r) == 1))
    watcher = Watcher(backend.routers[0])
    await until(lambda: watcher.seen == [("joined", "i1")])
    await one.leave()
    await until(lambda: watcher.seen == [("joined", "i1"), ("left", "i1")])
    assert backend.routers[0].records() == {}
    await watcher.close()


@of(REAL)
async def test_after_a_restart_of_the_registry_everybody_is_there_and_new_workers_join(backend: Backend) -> None:
    await backend.join(record())
    await until(lambda: everywhere(backend, lambda r: set(r) == {"w0"}))
    await backend.restart()
    await backend.join(record("w1"))
    await until(lambda: everywhere(backend, lambda r: set(r) == {"w0", "w1"}), within_s=10.0)


@of(ALL)
async def test_records_are_a_copy(backend: Backend) -> None:
    await backend.join(record())
    await until(lambda: everywhere(backend, lambda r: "w0" in r))
    dict(backend.routers[0].records()).clear()
    backend.routers[0].records().clear()
    assert "w0" in backend.routers[0].records()
