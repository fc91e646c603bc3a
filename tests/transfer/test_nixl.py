"""Real NIXL between two processes on CPU memory: over shared memory (UCX's own choice) and over TCP."""

import contextlib
import dataclasses
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.transfer.nixl_peer import BLOCK_BYTES, SLOT_BYTES, SLOTS, pattern, serve
from twinflow.cache.arena import ArenaGeometry
from twinflow.transfer import nixl
from twinflow.transfer.base import PeerArena, ReadRange, TransferError
from twinflow.transfer.nixl import NixlTransport, agent_name
from twinflow.transfer.paths import refuse_tcp
from twinflow.transfer.plan import plan_pull
from twinflow.transfer.thread import PullFinished, TransferThread

pytest.importorskip("nixl")
pytestmark = pytest.mark.timeout(90)

TOTAL = 64 << 20
GEOMETRY = ArenaGeometry(TOTAL, BLOCK_BYTES, SLOT_BYTES, (TOTAL - SLOTS * SLOT_BYTES) // BLOCK_BYTES, SLOTS)
PATHS = {"default": (None, "ucx/cma"), "tcp": ("tcp", "ucx/tcp")}


class Peer:
    def __init__(self, tls: str | None, incarnation: str = "i1", seed: int = 1) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, incarnation, TOTAL, tls, seed), daemon=True)
        self.process.start()
        theirs.close()
        assert self.conn.poll(60), "the peer did not start"
        self.arena: PeerArena = self.conn.recv()
        self.bytes = pattern(TOTAL, seed)

    def pause(self) -> None:
        """Returns once all of its threads stand still: until then one may serve a read yet."""
        pid = self.process.pid or 0
        os.kill(pid, signal.SIGSTOP)
        while any(t.read_text().rsplit(")", 1)[1].split()[0] != "T" for t in Path(f"/proc/{pid}/task").glob("*/stat")):
            time.sleep(0.001)

    def stop(self) -> None:
        conn: Connection = self.conn
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):  # a resumed peer may be killed by its transport
            if self.process.is_alive():
                os.kill(self.process.pid or 0, signal.SIGCONT)
                conn.send("stop")
                self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        conn.close()


class Reader:
    def __init__(self, max_post_bytes: int = 8 << 20) -> None:
        self.storage = torch.zeros(TOTAL, dtype=torch.uint8)
        self.events: queue.Queue[PullFinished] = queue.Queue()
        self.transport = NixlTransport(agent_name("decode-0", str(time.monotonic_ns()), 1), self.storage)
        self.thread = TransferThread(self.transport, self.events.put, max_post_bytes=max_post_bytes)

    def pull(self, pull_id: str, peer: PeerArena, ranges: list[ReadRange], timeout_s: float = 20) -> PullFinished:
        self.thread.pull(pull_id, peer.key, ranges)
        event = self.events.get(timeout=timeout_s)
        print(f"\n{pull_id}: {event}", file=sys.stderr)
        assert event.pull_id == pull_id
        return event


@pytest.fixture(params=list(PATHS))
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, str]:
    tls, expected = PATHS[request.param]
    monkeypatch.delenv("UCX_TLS", raising=False)
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    return tls, expected


@pytest.fixture
def peer(path: tuple[str | None, str]) -> Iterator[Peer]:
    peer = Peer(path[0])
    yield peer
    peer.stop()


@pytest.fixture
def reader(path: tuple[str | None, str]) -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.thread.close()


def check(reader: Reader, peer: Peer, blocks: list[tuple[int, int]], slots: list[tuple[int, int]]) -> None:
    for pairs, size, at in (
        (blocks, BLOCK_BYTES, GEOMETRY.block_offset),
        (slots, SLOT_BYTES, GEOMETRY.slot_offset),
    ):
        for theirs, ours in pairs:
            got = reader.storage[at(ours) : at(ours) + size]
            assert torch.equal(got, peer.bytes[at(theirs) : at(theirs) + size]), (theirs, ours)


def test_bytes_are_equal_and_the_path_is_named(peer: Peer, reader: Reader, path: tuple[str | None, str]) -> None:
    reader.thread.connect(peer.arena)
    runs = [(i, i) for i in range(100, 400)]  # coalesces to one range, cut into posts
    scattered = [(7 * i % 97, 599 - i) for i in range(60)]
    slots = [(0, 1), (1, 2), (3, 0)]
    ranges = plan_pull(GEOMETRY, peer.arena, runs + scattered, slots)
    assert len(ranges) < 100
    event = reader.pull("request/1", peer.arena, ranges)
    assert event.ok, event
    assert event.transport == path[1]
    assert event.bytes == 360 * BLOCK_BYTES + 3 * SLOT_BYTES
    check(reader, peer, runs + scattered, slots)
    untouched = reader.storage[GEOMETRY.block_offset(401) : GEOMETRY.block_offset(540)]
    assert not untouched.any()
    again = reader.pull("request/2", peer.arena, plan_pull(GEOMETRY, peer.arena, [(1, 1)], []))
    assert again.ok
    assert again.transport == path[1]


def test_bad_peers_fail_the_pull_alone(peer: Peer, reader: Reader) -> None:
    good = peer.arena
    one = plan_pull(GEOMETRY, good, [(3, 3)], [])
    bad = {
        "garbage": dataclasses.replace(good, incarnation="x1", agent_metadata=b"no metadata at all"),
        "empty": dataclasses.replace(good, incarnation="x2", agent_metadata=b""),
        "cut": dataclasses.replace(good, incarnation="x3", agent_metadata=good.agent_metadata[:100]),
        "misnamed": dataclasses.replace(good, incarnation="x4", agent_name="somebody/else/1"),
    }
    for name, arena in bad.items():
        reader.thread.connect(arena)
        event = reader.pull(name, arena, one)
        assert not event.ok
        assert "cannot connect" in event.error, event
    outside = dataclasses.replace(good, base_address=good.base_address + (1 << 30))
    reader.thread.connect(outside)
    event = reader.pull("outside", outside, one)
    assert not event.ok
    assert "refused" in event.error
    reader.thread.disconnect(outside.key)
    assert "no connection" in reader.pull("unknown", good, one).error
    reader.thread.connect(good)
    assert reader.pull("good", good, one).ok
    check(reader, peer, [(3, 3)], [])


def test_a_killed_peer_is_an_error_and_its_next_incarnation_connects(
    peer: Peer, reader: Reader, path: tuple[str | None, str]
) -> None:
    everything = plan_pull(GEOMETRY, peer.arena, [(i, i) for i in range(GEOMETRY.blocks)], [])
    reader.thread.connect(peer.arena)
    assert reader.pull("before", peer.arena, everything[:1]).ok
    os.kill(peer.process.pid or 0, signal.SIGKILL)
    peer.process.join(10)
    started = time.monotonic()
    event = reader.pull("after", peer.arena, everything)
    assert not event.ok
    assert time.monotonic() - started < 10
    assert reader.thread.in_flight.posts == 0
    reborn = Peer(path[0], incarnation="i2", seed=2)
    try:
        reader.storage.zero_()
        reader.thread.disconnect(peer.arena.key)
        reader.thread.connect(reborn.arena)
        assert reader.pull("reborn", reborn.arena, everything).ok
        check(reader, reborn, [(i, i) for i in range(GEOMETRY.blocks)], [])
    finally:
        reborn.stop()


def test_a_stopped_peer_neither_hangs_the_thread_nor_writes_after_close(
    peer: Peer, reader: Reader, path: tuple[str | None, str]
) -> None:
    """Over TCP a READ from a stopped peer stays posted; only closing the transport ends it."""
    everything = plan_pull(GEOMETRY, peer.arena, [(i, i) for i in range(GEOMETRY.blocks)], [])
    reader.thread.connect(peer.arena)
    assert reader.pull("before", peer.arena, plan_pull(GEOMETRY, peer.arena, [(1, 1)], [])).ok
    peer.pause()
    reader.thread.pull("stuck", peer.arena.key, everything)
    if path[0] == "tcp":
        while not reader.thread.in_flight.posts:
            time.sleep(0.01)
        reader.thread.cancel("stuck")
        with pytest.raises(queue.Empty):
            reader.events.get(timeout=1)
        assert reader.thread.in_flight.oldest_s > 0.5
    started = time.monotonic()
    reader.thread.close()
    assert time.monotonic() - started < 5
    event = reader.events.get(timeout=1)
    assert not event.ok or path[0] is None  # shared memory is read without the peer's help
    assert reader.thread.in_flight.posts == 0
    reader.storage.zero_()
    os.kill(peer.process.pid or 0, signal.SIGCONT)
    time.sleep(0.5)
    assert not reader.storage.any(), "bytes were written after close"


def test_close_ends_reads_that_are_under_way(peer: Peer, reader: Reader) -> None:
    reader.thread.connect(peer.arena)
    assert reader.pull("before", peer.arena, plan_pull(GEOMETRY, peer.arena, [(1, 1)], [])).ok
    reader.thread.pull("during", peer.arena.key, plan_pull(GEOMETRY, peer.arena, [(i, i) for i in range(600)], []))
    reader.thread.close()
    reader.storage.zero_()
    time.sleep(0.3)
    assert not reader.storage.any()


def test_a_post_that_is_too_large_is_refused(reader: Reader) -> None:
    with pytest.raises(TransferError, match="no connection"):
        reader.transport.post(("nobody", "i", 1), [ReadRange(0, 0, 1)])


def test_tcp_is_refused_where_rdma_is_required(peer: Peer, path: tuple[str | None, str]) -> None:
    """With the reason, from the first read on; shared memory is fine."""
    events: queue.Queue[PullFinished] = queue.Queue()
    transport = NixlTransport(
        agent_name("decode-0", str(time.monotonic_ns()), 1), torch.zeros(TOTAL, dtype=torch.uint8)
    )
    thread = TransferThread(transport, events.put, path_rule=refuse_tcp)  # type: ignore[arg-type]
    try:
        thread.connect(peer.arena)
        for k in range(2):
            thread.pull(f"r/{k}", peer.arena.key, plan_pull(GEOMETRY, peer.arena, [(1, 1)], []))
            event = events.get(timeout=20)
            assert event.ok == (path[0] != "tcp") and event.refused == (path[0] == "tcp"), event
            if event.refused:
                assert "prefill-0 is not read: reads take ucx/tcp and require_rdma is on" in event.error
    finally:
        thread.close()


def test_an_agent_that_somebody_still_refers_to_is_not_gone(peer: Peer) -> None:
    """Its destructor ends the reads, so `close` does not return before it has run."""
    transport = NixlTransport(
        agent_name("decode-0", str(time.monotonic_ns()), 1), torch.zeros(TOTAL, dtype=torch.uint8)
    )
    transport.connect(peer.arena)
    handle = transport.post(peer.arena.key, plan_pull(GEOMETRY, peer.arena, [(1, 1)], []))
    held = transport._reads[handle]
    with pytest.raises(TransferError, match="cannot be destroyed: 1 references"):
        transport.close()
    del held
    transport.close()
    transport.close()


def test_a_way_is_woken_by_a_read_that_nobody_waits_for(
    peer: Peer, path: tuple[str | None, str], reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the first read and a pause, once at a time, into memory of its own; reads and ends go on as without it."""
    transport, key = reader.transport, peer.arena.key
    monkeypatch.setattr(nixl, "WAKE_PATH", path[1].removeprefix("ucx/"))
    monkeypatch.setattr(nixl, "AWAKE_S", 0.0)
    reader.thread.connect(peer.arena)

    def wake() -> object:
        """The reads that wake, once the thread has seen the command."""
        reader.thread.wake(key)
        reader.thread.pull("none", ("nobody", "i", 1), [])
        assert reader.events.get(timeout=20).pull_id == "none"
        return transport._peers[key].waking

    assert wake() is None, "which path reads take is not known before the first one"
    assert reader.pull("r/1", peer.arena, plan_pull(GEOMETRY, peer.arena, [(1, 1)], [])).ok
    before = reader.storage.clone()
    peer.pause()
    first = wake()
    assert first is not None
    assert path[0] is None or wake() is first, "over TCP it waits for its peer, and no second one is told"
    os.kill(peer.process.pid or 0, signal.SIGCONT)
    deadline = time.monotonic() + 20
    while wake() is first:
        assert time.monotonic() < deadline
    assert torch.equal(reader.storage, before)
    monkeypatch.setattr(nixl, "AWAKE_S", 1e9)
    last = wake()
    assert wake() is last, "nothing sleeps so soon"
    assert reader.pull("r/2", peer.arena, plan_pull(GEOMETRY, peer.arena, [(5, 7)], [(1, 2)])).ok
    check(reader, peer, [(1, 1), (5, 7)], [(1, 2)])
    reader.thread.disconnect(key)
    assert not reader.pull("r/3", peer.arena, plan_pull(GEOMETRY, peer.arena, [(2, 2)], [])).ok
    reader.thread.close()  # the agent is gone: no reference to one of these reads is left


def test_a_waking_read_that_cannot_be_told_is_forgotten(
    peer: Peer, path: tuple[str | None, str], reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "WAKE_PATH", path[1].removeprefix("ucx/"))
    monkeypatch.setattr(nixl, "AWAKE_S", 0.0)
    reader.thread.connect(peer.arena)
    assert reader.pull("r/1", peer.arena, plan_pull(GEOMETRY, peer.arena, [(1, 1)], [])).ok
    known = reader.transport._peers[peer.arena.key]
    known.arena = dataclasses.replace(known.arena, agent_name="somebody else")
    reader.transport.wake(peer.arena.key)
    assert known.waking is None
