"""The redis registry against a real server that goes away, comes back empty, holds rubbish, and is shared."""

import asyncio
import importlib.util
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.node.backends import TTL_S, RedisBackend, Watcher, record, until
from tests.node.redis_server import PASSWORD
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.workers import WorkerRecord
from twinflow.node.registry.entries import Entry, encode
from twinflow.node.registry.factory import RegistryKind, RegistrySettings, hosted_registry, registration
from twinflow.node.registry.redis import Pauses, RedisRegistration, RedisRegistry, Server


@pytest.fixture
async def backend(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[RedisBackend]:
    """Whatever a test does, the password is in no log."""
    caplog.set_level(logging.DEBUG)
    backend = RedisBackend(tmp_path)
    await backend.open()
    yield backend
    await backend.close()
    assert PASSWORD not in caplog.text


@pytest.fixture
async def raw(backend: RedisBackend) -> AsyncIterator[Redis]:
    async with Redis.from_url(backend.server.url, protocol=2) as client:
        yield client


def ids(backend: RedisBackend) -> list[set[str]]:
    return [set(router.records()) for router in backend.routers]


async def known(backend: RedisBackend, *names: str, within_s: float = 8.0) -> None:
    try:
        await until(lambda: ids(backend) == [set(names)] * len(backend.routers), within_s)
    except TimeoutError:
        raise AssertionError(f"routers know {ids(backend)}, not {names}") from None


@pytest.mark.parametrize("sessions", [True, False], ids=["sessions-up", "sessions-down"])
async def test_the_loss_of_redis_changes_nothing_for_known_workers(
    backend: RedisBackend, sessions: bool, caplog
) -> None:
    worker = await backend.join(record())
    await known(backend, "w0")
    watcher = Watcher(backend.routers[0])
    if sessions:
        backend.alive.add(worker.record.key)
    backend.server.kill()
    await asyncio.sleep(3 * TTL_S)
    await known(backend, "w0")
    late = await backend.join(record("w1"))
    backend.server.start()
    await known(backend, "w0", "w1")
    await until(lambda: worker.registration.registered and late.registration.registered)
    await asyncio.sleep(TTL_S + Pauses.MAX_S)
    await known(backend, "w0", "w1")
    assert {kind for kind, _ in watcher.seen} == {"joined"}, "nobody left in between"
    assert f"Redis at 127.0.0.1:{backend.server.port} is away" in caplog.text
    assert f"Redis at 127.0.0.1:{backend.server.port} is back" in caplog.text
    await watcher.close()


async def test_a_redis_that_hangs_is_away_too(backend: RedisBackend, caplog) -> None:
    await backend.join(record())
    await known(backend, "w0")
    pid = backend.server.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: "is away" in caplog.text)
        await known(backend, "w0")
    finally:
        os.kill(pid, signal.SIGCONT)
    await backend.join(record("w1"))
    await known(backend, "w0", "w1")


async def test_who_died_during_the_loss_is_removed_soon_after_it(backend: RedisBackend) -> None:
    worker = await backend.join(record())
    await backend.join(record("w1"))
    await known(backend, "w0", "w1")
    backend.server.kill()
    await backend.crash(worker)
    await asyncio.sleep(2 * TTL_S)
    await known(backend, "w0", "w1")
    backend.server.start()
    await known(backend, "w1")


async def test_a_worker_with_a_session_outlives_its_entry(backend: RedisBackend) -> None:
    backend.alive.add(record().key)
    await backend.say_once(record())
    await known(backend, "w0")
    await asyncio.sleep(3 * TTL_S)
    await known(backend, "w0")
    backend.alive.clear()
    await known(backend)


async def test_a_goodbye_ends_it_although_the_session_is_up(backend: RedisBackend) -> None:
    worker = await backend.join(record())
    await known(backend, "w0")
    backend.alive.add(worker.record.key)
    await worker.leave()
    await known(backend, within_s=0.8 * TTL_S)


async def test_two_incarnations_that_both_write(backend: RedisBackend) -> None:
    old = await backend.join(record())
    await known(backend, "w0")
    new = await backend.join(record(incarnation="i2"))
    await until(lambda: all(r.records()["w0"].incarnation == "i2" for r in backend.routers))
    watcher = Watcher(backend.routers[0])
    old.change(draining=True)
    await asyncio.sleep(2 * TTL_S)
    assert {incarnation for _, incarnation in watcher.seen} == {"i2"}
    await new.leave()
    await until(lambda: all(r.records()["w0"].draining for r in backend.routers))
    await watcher.close()


async def test_rubbish_is_logged_once_and_ignored(backend: RedisBackend, raw: Redis, caplog) -> None:
    prefix = "twinflow:worker:"
    await raw.set(f"{prefix}bad:i1", b"\xff{")
    await raw.set(f"{prefix}new:i1", b'{"schema": 7, "order": 1, "record": {}}')
    await raw.set(f"{prefix}liar:i1", encode(Entry(record("other"), 1)))
    await raw.hset(f"{prefix}hash:i1", "a", "b")
    names = [f"{prefix}{n}:i1" for n in ("bad", "new", "liar", "hash", "gone")]
    await raw.sadd("twinflow:workers", *names, "elsewhere")
    await raw.xadd("twinflow:changes", {"what": b"\xff"})
    await backend.join(record())
    await known(backend, "w0")
    await asyncio.sleep(TTL_S)
    for complaint in ("not an entry of a worker", "schema 7, this release reads 1", "it is the record of other"):
        assert caplog.text.count(complaint) == len(backend.routers), complaint
    await known(backend, "w0")


async def test_clusters_share_a_redis_by_prefix(backend: RedisBackend) -> None:
    backend.routers.append(backend.router("other"))
    await backend.join(record())
    await backend.join(record("w1"), prefix="other")
    await until(lambda: ids(backend) == [{"w0"}, {"w0"}, {"w1"}])


async def test_a_cluster_that_is_gone_leaves_nothing_behind(backend: RedisBackend, raw: Redis) -> None:
    worker = await backend.join(record())
    await known(backend, "w0")
    await backend.crash(worker)
    for key in await raw.keys("*"):
        assert 0 < await raw.pttl(key) <= 20 * TTL_S * 1e3, key


async def test_a_wrong_password_is_retried_and_not_shown(backend: RedisBackend, caplog) -> None:
    url = backend.server.url.replace(PASSWORD, "wrong-secret")
    task = asyncio.create_task(RedisRegistration(url, "twinflow", TTL_S, record).run())
    registry = RedisRegistry(url, "twinflow", TTL_S, lambda key: False)
    watching = asyncio.create_task(registry.run())
    await until(lambda: "not registered" in caplog.text and "0 known workers stay" in caplog.text)
    for each in (task, watching):
        each.cancel()
    await asyncio.gather(task, watching, return_exceptions=True)
    assert "wrong-secret" not in caplog.text


@pytest.mark.parametrize(
    "url",
    [f"redis//{PASSWORD}", f"redis://u:{PASSWORD}@h:notaport{PASSWORD}", "http://x"],
    ids=["no-scheme", "port", "other-scheme"],
)
def test_a_bad_url_is_an_error_without_the_url(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Server(url, 1.0)
    assert PASSWORD not in caught.value.message and "redis://[user:password@]host:port/db" in caught.value.message
    assert caught.value.__suppress_context__


def provide() -> WorkerRecord:
    return record()


async def test_the_factory_reads_the_url_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RegistrySettings(RegistryKind.REDIS, redis_url_env="SOME_URL")
    with pytest.raises(BadRequest, match="environment variable SOME_URL"):
        hosted_registry(settings, 3.0, lambda key: False)
    monkeypatch.setenv("SOME_URL", f"redis://:{PASSWORD}@127.0.0.1:1/3")
    assert isinstance(hosted_registry(settings, 3.0, lambda key: False), RedisRegistry)
    made = registration(settings, ("ignored:1",), provide)
    assert isinstance(made, RedisRegistration) and not made.registered
    assert PASSWORD not in repr(settings)


def test_without_the_client_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match=r"pip install 'twinflow\[redis\]'"):
        registration(RegistrySettings(RegistryKind.REDIS), (), provide)


@pytest.mark.parametrize("prefix", ["", "a:b", "a*", "ä"])
def test_a_prefix_is_a_plain_word(prefix: str) -> None:
    with pytest.raises(BadRequest, match="redis_prefix"):
        RegistrySettings(redis_prefix=prefix)
