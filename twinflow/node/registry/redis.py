"""The registry in a Redis: workers write themselves, routers read. Needs `twinflow[redis]`.

    PREFIX:worker:ID:INCARNATION   string: one entry (`entries`), lives `ttl_s`, written again five times within it
    PREFIX:workers                 set: the names of those keys, so that nobody scans a Redis shared with others
    PREFIX:changes                 stream: joined, changed (draining …), left; load alone is no change

Everything but live workers' own writes expires by itself. A router reads the stream, blocking, and after every change, or
five times per `ttl_s`, all entries; so what the stream loses arrives a moment later.

The loss of Redis changes nothing for known workers. While it is away a router's table stands still: a worker in it gets
requests exactly while its session with this router is up (the session's own heartbeats, `silence_s`). When Redis is back,
maybe empty, workers write themselves again within seconds (`Pauses.MAX_S`), and until that and one `ttl_s` have passed
nobody is removed. From then on a missing entry removes its worker only once the worker's session is gone too.
"""

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from grpc import aio
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from twinflow.contracts.errors import BadRequest
from twinflow.contracts.workers import Load, WorkerRecord
from twinflow.node.registry.base import Change
from twinflow.node.registry.entries import Entry, Key, Members, decode, encode
from twinflow.node.registry.memory import MemoryRegistry

log = logging.getLogger(__name__)

BEATS_PER_TTL = 5
ANSWER_S = 2.0  # a Redis that has not answered for so long counts as away
KEEP_CHANGES = 1000  # entries of the stream; a reader that missed more sees all but who left, and that by expiry
STALE_TTLS = 20  # the set and the stream of a cluster that is gone vanish after so many ttl_s

GONE = (RedisError, OSError, TimeoutError)


class Keys:
    def __init__(self, prefix: str) -> None:
        self.workers = f"{prefix}:workers"
        self.changes = f"{prefix}:changes"
        self._worker = f"{prefix}:worker:"

    def worker(self, key: Key) -> str:
        return f"{self._worker}{key[0]}:{key[1]}"

    def is_worker(self, name: bytes) -> bool:
        return name.startswith(self._worker.encode())


class Server:
    """A Redis by its URL, which nobody else keeps; str() is where it is, without user and password."""

    def __init__(self, url: str, answer_s: float) -> None:
        """Connects to nothing yet. Raises BadRequest, without the URL in it."""
        try:
            self.client: Any = Redis.from_url(  # untyped: what redis says of its own answers differs between releases
                url,
                protocol=2,  # the shape of XREAD's answer depends on it
                decode_responses=False,  # what others wrote need not be text
                socket_connect_timeout=ANSWER_S,
                socket_timeout=answer_s,
                retry=Retry(NoBackoff(), 0),  # the back-off is `Pauses`
            )
        except (ValueError, TypeError):
            raise BadRequest("the Redis URL is none; write redis://[user:password@]host:port/db") from None
        where = self.client.connection_pool.connection_kwargs
        self._shown = where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"

    def __str__(self) -> str:
        return f"Redis at {self._shown}"

    async def close(self) -> None:
        with contextlib.suppress(*GONE):
            await self.client.aclose()


class Pauses:
    """Between tries: growing from 0.1 s to `MAX_S`, jittered so that a cluster does not come back all at once."""

    MAX_S = 2.0

    def __init__(self) -> None:
        self._next_s = 0.1

    def reset(self) -> None:
        self._next_s = 0.1

    async def wait(self) -> None:
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self.MAX_S)
        await asyncio.sleep(pause_s)


class RedisRegistry:
    """Router side, a `HostedRegistry`. `alive` says whether this router's session with an incarnation is up."""

    def __init__(self, url: str, prefix: str, ttl_s: float, alive: Callable[[Key], bool]) -> None:
        self._table = MemoryRegistry()
        self._members = Members(self._table, alive)
        self._keys = Keys(prefix)
        self._ttl_s = ttl_s
        self._scan_s = ttl_s / BEATS_PER_TTL
        self._server = Server(url, ANSWER_S + self._scan_s)
        self.up = False
        self._last: bytes | None = None  # id of the last change read; None before the first connection
        self._left: set[Key] = set()  # said goodbye, not yet applied
        self._bad: dict[bytes, str] = {}  # key → what is wrong with its entry, as logged

    def records(self) -> Mapping[str, WorkerRecord]:
        return self._table.records()

    def watch(self) -> AsyncIterator[Change]:
        return self._table.watch()

    def add_to(self, server: aio.Server) -> None:
        """Nobody dials the router to register."""

    async def run(self) -> None:
        pauses, problem = Pauses(), ""
        try:
            while True:
                try:
                    async for _ in self._follow():
                        end_if_cancelled()
                        pauses.reset()
                        self.up = True
                        if problem:
                            log.warning("%s is back", self._server)
                            problem = ""
                except GONE as e:
                    self.up = False
                    if problem != (problem := one_line(e)):
                        known = len(self._table.records())
                        log.warning("%s is away (%s); %d known workers stay", self._server, problem, known)
                end_if_cancelled()
                await pauses.wait()
        finally:
            await self._server.close()

    async def _follow(self) -> AsyncIterator[None]:
        """Yields after each scan, for ever. Raises one of GONE."""
        await self._find_place()
        patient_until_s = time.monotonic() + self._ttl_s + Pauses.MAX_S
        while True:
            entries = await self._scan()
            self._members.apply(entries, self._left, patient=time.monotonic() < patient_until_s)
            self._left.clear()
            yield
            await self._changes()

    async def _find_place(self) -> None:
        """Where to read on in the stream: at its end at first, later where we were, unless it has begun anew."""
        newest = await self._server.client.xrevrange(self._keys.changes, count=1)
        end = newest[0][0] if newest else b"0-0"
        if self._last is None or stream_order(end) < stream_order(self._last):
            self._last = end

    async def _changes(self) -> None:
        """Waits for changes, at most `scan_s`; notes whose goodbye was the last word."""
        block_ms = max(1, round(self._scan_s * 1e3))
        answer = await self._server.client.xread({self._keys.changes: self._last}, block=block_ms, count=KEEP_CHANGES)
        for id, fields in answer[0][1] if answer else ():
            self._last = id
            key = (text_of(fields, b"id"), text_of(fields, b"incarnation"))
            if text_of(fields, b"change") == "left":
                self._left.add(key)
            else:
                self._left.discard(key)

    async def _scan(self) -> list[Entry]:
        names = [n for n in await self._server.client.smembers(self._keys.workers) if self._keys.is_worker(n)]
        values = await self._server.client.mget(names) if names else []
        found = dict(zip(names, values, strict=True))
        expired = [name for name, value in found.items() if value is None]
        if expired:  # a worker that comes back adds its name again with every beat
            await self._server.client.srem(self._keys.workers, *expired)
        return list(self._readable({n: v for n, v in found.items() if v is not None}))

    def _readable(self, found: Mapping[bytes, bytes]) -> Iterator[Entry]:
        """Without what is malformed; that is logged once, until it changes."""
        bad: dict[bytes, str] = {}
        for name, value in found.items():
            try:
                entry = decode(value)
                if self._keys.worker(entry.record.key).encode() != name:
                    raise BadRequest(f"it is the record of {entry.record.id}, incarnation {entry.record.incarnation}")
                yield entry
            except BadRequest as e:
                bad[name] = e.message
                if self._bad.get(name) != e.message:
                    log.warning("ignored the entry at key %r of %s: %s", name, self._server, e.message)
        self._bad = bad


class RedisRegistration:
    """Worker side, a `Registration`."""

    def __init__(self, url: str, prefix: str, ttl_s: float, provide: Callable[[], WorkerRecord]) -> None:
        """`provide` is called on the event loop before every heartbeat and must not block."""
        self._server = Server(url, ANSWER_S)
        self._keys = Keys(prefix)
        self._ttl_s = ttl_s
        self._provide = provide
        self._order = 0  # drawn at the first write, kept for life
        self._told: WorkerRecord | None = None  # without load; None = routers must be told
        self._poke = asyncio.Event()

    @property
    def registered(self) -> bool:
        return self._told is not None

    def announce(self) -> None:
        self._poke.set()

    async def run(self) -> None:
        pauses, problem = Pauses(), ""
        try:
            while True:
                self._poke.clear()
                try:
                    await self._beat()
                except GONE as e:
                    self._told = None
                    if problem != (problem := one_line(e)):
                        log.warning("not registered: %s is away (%s); trying again", self._server, problem)
                    end_if_cancelled()
                    await pauses.wait()
                    continue
                end_if_cancelled()
                problem = ""
                pauses.reset()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._ttl_s / BEATS_PER_TTL):
                        await self._poke.wait()
        finally:
            await self._leave()
            await self._server.close()

    async def _beat(self) -> None:
        if not self._order:
            seconds, micros = await self._server.client.time()
            self._order = seconds * 1_000_000 + micros
        record = self._provide()
        facts = dataclasses.replace(record, load=Load())
        name = self._keys.worker(record.key)
        ttl_ms, stale_ms = round(self._ttl_s * 1e3), round(STALE_TTLS * self._ttl_s * 1e3)
        async with self._server.client.pipeline(transaction=True) as pipe:
            pipe.set(name, encode(Entry(record, self._order)), px=ttl_ms)
            pipe.sadd(self._keys.workers, name)
            pipe.pexpire(self._keys.workers, stale_ms)
            if facts != self._told:
                change = {"change": "changed" if self._told else "joined"} | change_key(record)
                pipe.xadd(self._keys.changes, change, maxlen=KEEP_CHANGES, approximate=True)
            pipe.pexpire(self._keys.changes, stale_ms)
            await pipe.execute()
        if self._told is None:
            log.info("registered at %s", self._server)
        self._told = facts

    async def _leave(self) -> None:
        """Goodbye, if Redis is there to hear it; else the entry expires."""
        record, name = self._provide(), self._keys.worker(self._provide().key)
        self._told = None
        with contextlib.suppress(*GONE):
            async with asyncio.timeout(ANSWER_S), self._server.client.pipeline(transaction=True) as pipe:
                pipe.delete(name)
                pipe.srem(self._keys.workers, name)
                pipe.xadd(
                    self._keys.changes, {"change": "left"} | change_key(record), maxlen=KEEP_CHANGES, approximate=True
                )
                await pipe.execute()


def end_if_cancelled() -> None:
    """redis sends through `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes as it completes."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def change_key(record: WorkerRecord) -> dict[str, str]:
    return {"id": record.id, "incarnation": record.incarnation}


def text_of(fields: Mapping[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode(errors="replace")


def stream_order(id: bytes) -> tuple[int, ...]:
    """Stream ids compare as numbers: milliseconds, then a sequence number."""
    return tuple(map(int, id.split(b"-")))


def one_line(error: BaseException) -> str:
    """redis' messages name host and port at most."""
    return " ".join(f"{type(error).__name__}: {error}".split())
