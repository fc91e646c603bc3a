"""The transfer thread over the loopback: one terminal event per pull, after all of its reads are terminal."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from twinflow.transfer.base import PeerArena, PeerKey, ReadRange, TransferError
from twinflow.transfer.loopback import AtPost, LoopbackNetwork, LoopbackTransport, Manual, PostedRead
from twinflow.transfer.thread import PullFinished, TransferThread

pytestmark = pytest.mark.timeout(30)

TOTAL = 4096


def arena(name: str = "p/1/1", worker: str = "p") -> PeerArena:
    return PeerArena(worker, "1", 1, 0, TOTAL, 16, 32, 16, 4, "DRAM", 0, name, name.encode())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.001)


class World:
    def __init__(self) -> None:
        self.network = LoopbackNetwork()
        self.source = bytearray(i % 251 for i in range(TOTAL))
        self.server = LoopbackTransport(self.network, "p/1/1", self.source)
        self.target = bytearray(TOTAL)
        self.manual = Manual()
        self.events: queue.Queue[PullFinished] = queue.Queue()
        self.transport = LoopbackTransport(self.network, "d/1/1", self.target, self.manual)
        self.thread = TransferThread(self.transport, self.events.put, posts_per_peer=2, max_post_bytes=64)

    def event(self) -> PullFinished:
        return self.events.get(timeout=10)

    def reads(self, n: int) -> list[PostedRead]:
        until(lambda: len(self.manual.reads) >= n)
        time.sleep(0.005)
        assert len(self.manual.reads) == n
        return self.manual.reads


@pytest.fixture
def world() -> Iterator[World]:
    w = World()
    w.thread.connect(arena())
    yield w
    w.thread.close()
    assert w.events.empty()


def test_posts_are_split_and_bounded_per_peer(world: World) -> None:
    other = bytearray(b"\x77" * TOTAL)
    LoopbackTransport(world.network, "q/1/1", other)
    world.thread.connect(arena("q/1/1", "q"))
    world.thread.pull("a/1", arena().key, [ReadRange(0, 512, 200)])
    assert [r.size_bytes for r in world.reads(2)] == [64, 64]
    world.thread.pull("b/1", ("q", "1", 1), [ReadRange(0, 2048, 10)])  # not held up by the other peer
    world.reads(3)[2].copy()
    world.manual.reads[2].done()
    assert world.event().pull_id == "b/1"
    assert world.thread.in_flight.posts == 2
    for k in range(2):
        world.manual.reads[k].copy()
        world.manual.reads[k].done()
    rest = world.reads(5)[3:]
    assert [r.size_bytes for r in rest] == [64, 8]
    assert world.events.empty()
    for r in rest:
        r.copy()
        r.done()
    done = world.event()
    assert done == PullFinished("a/1", True, "", 200, done.seconds, 4, "loopback", began=done.began)
    assert world.target[512:712] == world.source[:200]
    until(lambda: world.thread.in_flight.posts == 0)


def test_a_read_that_stays_out_is_looked_at_ever_less_often(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first all the time, so that its end is seen when it is due, then once a millisecond."""
    seen: list[float] = []
    poll = world.transport.poll
    monkeypatch.setattr(world.transport, "poll", lambda handle: (seen.append(time.monotonic()), poll(handle))[1])
    world.thread.pull("a/1", arena().key, [ReadRange(0, 0, 64)])
    (read,) = world.reads(1)
    time.sleep(0.2)
    read.copy()
    read.done()
    event = world.event()
    early = [b - a for a, b in itertools.pairwise(seen[:20])]
    assert min(early) < 0.5e-3
    assert len(seen) < 450, "16 times until its age has grown by a factor of e, then every millisecond"
    assert event.seconds > 0.2


def test_the_time_of_a_read_is_that_of_the_transport(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment that it is set going until it is seen to be done: without what is made ready before, and told after."""
    post, path = world.transport.post, world.transport.transport_in_use

    def slow(key: PeerKey, ranges: Sequence[ReadRange]) -> int:
        time.sleep(0.4)
        handle = post(key, ranges)
        world.manual.reads[-1].copy()
        world.manual.reads[-1].done()
        return handle

    monkeypatch.setattr(world.transport, "post", slow)
    monkeypatch.setattr(world.transport, "transport_in_use", lambda key: (time.sleep(0.4), path(key))[1])
    before = time.monotonic()
    world.thread.pull("a/1", arena().key, [ReadRange(0, 0, 64)])
    event = world.event()
    assert event.ok and event.began - before >= 0.4
    assert event.seconds < 0.3


def test_nothing_to_read_is_done(world: World) -> None:
    world.thread.pull("a/1", arena().key, [])
    assert world.event() == PullFinished("a/1", True)


class Blocking:
    """A transport whose every call waits until it may go on, as a post over shared memory takes its time; it notes who called."""

    def __init__(self, inner: LoopbackTransport) -> None:
        self._inner = inner
        self.calls: list[tuple[str, int]] = []
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        if callable(found):
            self.calls.append((name, threading.get_ident()))
            self.go_on.wait()
        return found


def test_who_asks_never_waits_for_the_transport() -> None:
    """The engine's loop does: whatever calls to the agent cost, they are made by one thread, and it is another one."""
    network, events = LoopbackNetwork(), queue.Queue[PullFinished]()
    LoopbackTransport(network, "p/1/1", bytearray(b"x" * TOTAL))
    transport = Blocking(LoopbackTransport(network, "d/1/1", bytearray(TOTAL), AtPost()))
    thread = TransferThread(transport, events.put, max_post_bytes=200)  # type: ignore[arg-type]
    thread.connect(arena())  # to wait for it here would be to wait for ever
    for i in range(3):
        thread.pull(f"{i}/1", arena().key, [ReadRange(0, 0, 300)])
    thread.cancel("2/1")
    transport.go_on.set()
    for _ in range(3):
        events.get(timeout=20)
    thread.close()
    assert {name for name, _ in transport.calls} >= {"connect", "post", "poll", "close"}
    (caller,) = {ident for _, ident in transport.calls}
    assert caller != threading.get_ident()


def test_cancel_reports_once_posted_reads_are_terminal(world: World) -> None:
    world.thread.pull("a/1", arena().key, [ReadRange(0, 0, 300)])
    reads = list(world.reads(2))
    world.thread.cancel("a/1")
    world.thread.cancel("unknown")
    time.sleep(0.02)
    assert world.events.empty()
    reads[0].copy()
    reads[0].done()
    time.sleep(0.02)
    assert world.events.empty()
    reads[1].fail("cut")
    event = world.event()
    assert (event.ok, event.error, event.bytes) == (False, "cancelled", 64)
    world.reads(2)


def test_a_raising_read_stops_its_pull_and_no_other(world: World) -> None:
    world.thread.pull("a/1", arena().key, [ReadRange(0, 0, 300)])
    world.thread.pull("b/1", arena().key, [ReadRange(0, 1024, 64)])
    first, second = world.reads(2)
    first.copy(0, 10)
    first.fail("peer is gone")
    world.reads(3)  # the first of b/1 takes the free place
    assert world.events.empty()
    second.done()
    event = world.event()
    assert (event.pull_id, event.ok, event.error) == ("a/1", False, "peer is gone")
    world.manual.reads[2].copy()
    world.manual.reads[2].done()
    assert world.event().ok


def test_connect_failures_fail_pulls_not_the_thread(world: World) -> None:
    world.thread.connect(arena("nobody/1/1", "nobody"))
    world.thread.pull("a/1", ("nobody", "1", 1), [ReadRange(0, 0, 1)])
    assert "cannot connect to nobody" in world.event().error
    world.thread.pull("a/2", ("stranger", "1", 1), [ReadRange(0, 0, 1)])
    assert "no connection to stranger" in world.event().error
    LoopbackTransport(world.network, "nobody/1/1", bytearray(TOTAL), AtPost())
    world.thread.connect(arena("nobody/1/1", "nobody"))
    world.thread.pull("a/3", ("nobody", "1", 1), [ReadRange(0, 0, 1)])
    world.reads(1)[0].done()
    assert world.event().ok
    world.thread.pull("a/4", arena().key, [ReadRange(TOTAL - 8, 0, 9)])
    assert "outside the peer" in world.event().error


def test_disconnect_waits_for_reads(world: World) -> None:
    world.thread.pull("a/1", arena().key, [ReadRange(0, 0, 64)])
    (read,) = world.reads(1)
    world.thread.disconnect(arena().key)
    world.thread.pull("a/2", arena().key, [ReadRange(0, 0, 64)])
    assert "disconnected" in world.event().error
    read.copy()
    read.done()
    assert world.event().ok
    world.thread.pull("a/3", arena().key, [ReadRange(0, 0, 64)])
    assert "no connection" in world.event().error


def test_close_ends_never_completing_reads(world: World) -> None:
    world.thread.pull("a/1", arena().key, [ReadRange(0, 0, 300)])
    reads = list(world.reads(2))
    assert world.thread.in_flight.bytes == 128
    world.thread.close()
    event = world.event()
    assert (event.pull_id, event.ok, event.error) == ("a/1", False, "closed")
    assert [r.copy() for r in reads] == [0, 0]
    assert not any(world.target)
    assert world.thread.in_flight.posts == 0


def test_an_unexpected_error_fails_every_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.thread.connect(arena())
    world.thread.pull("a/1", arena().key, [ReadRange(0, 0, 64)])
    (read,) = world.reads(1)
    monkeypatch.setattr(world.transport, "poll", lambda handle: 1 // 0)
    assert "ZeroDivisionError" in world.event().error
    assert read.copy() == 0
    world.thread.pull("a/2", arena().key, [ReadRange(0, 0, 64)])
    assert "ZeroDivisionError" in world.event().error
    world.thread.close()


def test_serving_makes_progress_without_own_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    transport = LoopbackTransport(LoopbackNetwork(), "p/1/1", bytearray(8))
    monkeypatch.setattr(transport, "progress", lambda: calls.append(time.monotonic()))
    thread = TransferThread(transport, lambda e: None, serve=True)
    until(lambda: len(calls) > 2)
    thread.serving(True)
    time.sleep(0.05)
    calls.clear()
    until(lambda: len(calls) > 20)
    assert (calls[20] - calls[0]) / 20 < 0.01
    thread.close()


def test_loopback_contract() -> None:
    network = LoopbackNetwork()
    LoopbackTransport(network, "p/1/1", bytearray(b"x" * TOTAL))
    with pytest.raises(ValueError, match="exists already"):
        LoopbackTransport(network, "p/1/1", bytearray(8))
    manual = Manual()
    d = LoopbackTransport(network, "d/1/1", bytearray(TOTAL), manual)
    d.connect(arena())
    with pytest.raises(TransferError, match="outside our"):
        d.post(arena().key, [ReadRange(0, TOTAL - 1, 2)])
    handle = d.post(arena().key, [ReadRange(0, 0, 4), ReadRange(100, 100, 4)])
    with pytest.raises(ValueError, match="not terminal"):
        d.free(handle)
    (read,) = manual.reads
    assert read.copy(2, 6) == 4
    assert not d.poll(handle)
    network.leave("p/1/1")
    assert read.copy() == 0
    with pytest.raises(TransferError, match="gone"):
        d.poll(handle)
    d.free(handle)
