"""A new generation: what opens one, what goes on meanwhile, and that closing the old one ends and frees what it doomed."""

from collections.abc import Callable, Iterator

import pytest

from twinflow.transfer import generation as generation_module
from twinflow.transfer import generations as generations_module
from twinflow.transfer.base import GenerationClosed, GenerationOpened, PeerArena, PullFinished, ReadRange, TransferError
from twinflow.transfer.generation import make_pull
from twinflow.transfer.generations import Generations, RenewalLimits
from twinflow.transfer.loopback import LoopbackNetwork, LoopbackTransport, Manual

TOTAL = 4096
LIMITS = RenewalLimits(doomed_bytes=100, doomed_s=10.0, drain_s=5.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(generation_module, "time", clock)
    monkeypatch.setattr(generations_module, "time", clock)
    return clock


class Reader:
    """A reader and two peers, p and q, driven by hand."""

    def __init__(self, *, serve: bool = False, limits: RenewalLimits = LIMITS) -> None:
        self.network = LoopbackNetwork()
        self.arenas = {}
        for name in ("p", "q"):
            LoopbackTransport(self.network, f"{name}/1/1", bytearray(name.encode() * TOTAL))
            self.arenas[name] = PeerArena(
                name, "1", 1, 0, TOTAL, 16, 32, 16, 4, "DRAM", 0, f"{name}/1/1", f"{name}/1/1".encode()
            )
        self.target = bytearray(TOTAL)
        self.manual = Manual()
        self.events: list[object] = []
        self.opened = 1
        self.fail_next = ""
        self.agents = {1: self.transport(1)}
        self.g = Generations(self.agents[1], self.events.append, reopen=self.reopen, limits=limits, serve=serve)
        for arena in self.arenas.values():
            self.g.connect(arena)

    def transport(self, number: int) -> LoopbackTransport:
        return LoopbackTransport(self.network, f"d/1/{number}", self.target, self.manual)

    def reopen(self, number: int) -> LoopbackTransport:
        if self.fail_next:
            raise TransferError(self.fail_next)
        self.agents[number] = self.transport(number)
        return self.agents[number]

    def pull(self, name: str, peer: str, size: int, posts: int = 1) -> None:
        each = [[ReadRange(0, 0, size)] for _ in range(posts)]
        self.g.pull(make_pull(name, self.arenas[peer].key, each))
        self.turn()

    def turn(self, times: int = 3) -> None:
        for _ in range(times):
            self.g.turn()

    def done(self, *reads: int) -> None:
        for k in reads:
            self.manual.reads[k].copy()
            self.manual.reads[k].done()
        self.turn()

    def of(self, kind: type) -> list:
        return [e for e in self.events if isinstance(e, kind)]

    @property
    def ended(self) -> dict[str, bool]:
        return {e.pull_id: e.ok for e in self.of(PullFinished)}


def doom(r: Reader, name: str = "stuck", size: int = 64) -> None:
    """A read of p that never ends, given up."""
    r.pull(name, "p", size)
    r.g.cancel(name)
    r.turn()


def by_bytes(r: Reader, clock: Clock) -> None:
    doom(r, "stuck", 64)
    assert r.g.current.number == 1, "64 of 100 B"
    doom(r, "stuck-2", 64)


def by_age(r: Reader, clock: Clock) -> None:
    doom(r)
    clock.now += 9.0
    r.turn()
    assert r.g.current.number == 1
    clock.now += 2.0
    r.turn()


def test_only_a_way_that_may_sleep_and_will_be_used_is_woken(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[tuple[str, str]] = []
    monkeypatch.setattr(LoopbackTransport, "wake", lambda self, key: woken.append((self.agent_name, key[0])))
    r = Reader()
    p, q = r.arenas["p"].key, r.arenas["q"].key
    r.g.wake(("nobody", "1", 1))
    assert not woken
    r.g.wake(p)
    assert woken == [("d/1/1", "p")]
    r.pull("a", "q", 32)
    r.g.wake(p)
    assert len(woken) == 1, "a read is out: nothing sleeps"
    r.done(0)
    r.g.wake(q)
    assert woken[1:] == [("d/1/1", "q")]
    r.g.disconnect(q)
    r.g.wake(q)
    assert r.g.renew("for this test")
    r.g.wake(p)
    assert len(woken) == 2, "neither one that leaves nor one that this generation has not met"
    r.pull("b", "p", 32)
    r.done(1)
    r.g.wake(p)
    assert woken[2:] == [("d/1/2", "p")]


@pytest.mark.parametrize("trigger", [by_bytes, by_age])
def test_a_bound_opens_a_generation_and_closing_the_old_one_frees(
    clock: Clock, trigger: Callable[[Reader, Clock], None]
) -> None:
    r = Reader()
    trigger(r, clock)
    r.turn()
    (opened,), (closed,) = r.of(GenerationOpened), r.of(GenerationClosed)
    assert (opened.generation, opened.agent_name, opened.agent_metadata) == (2, "d/1/2", b"d/1/2")
    assert "doomed" in opened.why
    stuck = [e for e in r.of(PullFinished) if e.pull_id.startswith("stuck")]
    assert closed == GenerationClosed(1, len(stuck), 64 * len(stuck))
    assert not any(e.ok for e in stuck)
    assert r.events.index(closed) > max(r.events.index(e) for e in stuck)
    assert [read.copy() for read in r.manual.reads] == [0] * len(r.manual.reads), "closed: nothing writes any more"
    assert (r.g.retiring, r.g.current.number, r.g.current.doomed.bytes) == (None, 2, 0)
    r.pull("next", "q", 32)
    r.done(len(r.manual.reads) - 1)
    assert r.ended["next"] and r.target[:32] == b"q" * 32


def test_healthy_pulls_of_the_old_generation_finish(clock: Clock) -> None:
    r = Reader()
    r.pull("healthy", "q", 32)
    doom(r, size=128)
    assert (r.g.current.number, r.g.retiring and r.g.retiring.number) == (2, 1)
    r.pull("new", "q", 32)  # goes through the new one meanwhile
    assert [k.agent_name for k in r.manual.reads] == ["q/1/1", "p/1/1", "q/1/1"]
    r.done(2)
    assert r.ended == {"new": True} and not r.of(GenerationClosed)
    r.done(0)
    assert r.ended == {"new": True, "healthy": True, "stuck": False}
    assert r.of(GenerationClosed) == [GenerationClosed(1, 1, 128)]


def test_a_pull_of_which_nothing_was_posted_moves_on(clock: Clock) -> None:
    """The stuck read holds up its own peer's queue; what waits behind it is not lost with the old generation."""
    r = Reader()
    for k in range(4):
        r.pull(f"flying-{k}", "p", 8)
    r.pull("waiting", "p", 8)
    assert len(r.manual.reads) == 4
    for k in range(4):
        r.g.cancel(f"flying-{k}")
    clock.now += 11
    r.turn()
    assert r.g.current.number == 2
    assert len(r.manual.reads) == 5, "posted by the new generation"
    r.done(4)
    assert r.ended["waiting"]


def test_what_hangs_in_the_old_generation_is_ended_after_its_time(clock: Clock) -> None:
    r = Reader()
    r.pull("hangs", "p", 32)
    doom(r, size=128)
    clock.now += 4.9
    r.turn()
    assert not r.of(GenerationClosed)
    clock.now += 0.2
    r.turn()
    assert r.of(GenerationClosed) == [GenerationClosed(1, 2, 160)]
    (hung,) = [e for e in r.of(PullFinished) if e.pull_id == "hangs"]
    assert not hung.ok and "generation 1 was closed" in hung.error


def test_one_at_a_time(clock: Clock) -> None:
    """While one is being retired, what the next one dooms waits."""
    r = Reader()
    r.pull("hangs", "q", 32)
    doom(r, size=128)
    doom(r, "again", size=128)
    assert r.g.current.number == 2 and not r.g.renew("asked for")
    clock.now += 6
    r.turn()
    assert [c.generation for c in r.of(GenerationClosed)] == [1, 2]
    assert r.g.current.number == 3 and r.g.current.doomed.bytes == 0
    assert r.g.in_flight.posts == 0


def test_a_generation_that_cannot_be_opened_is_tried_again(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    r = Reader()
    r.fail_next = "no device"
    doom(r, size=128)
    assert r.g.current.number == 1 and not r.of(GenerationOpened)
    r.pull("other", "q", 8)
    r.done(1)
    assert r.ended == {"other": True}, "the old one serves on"
    clock.now += 1.1
    r.turn()
    assert [m for m in caplog.messages if "no device" in m] == [m for m in caplog.messages if "cannot be opened" in m][
        :1
    ]
    r.fail_next = ""
    r.turn()
    assert r.g.current.number == 1, "not at once again"
    clock.now += 1.1
    r.turn()
    assert r.g.current.number == 2 and r.ended["stuck"] is False


def test_a_late_end_of_a_doomed_read_needs_no_generation(clock: Clock) -> None:
    r = Reader()
    doom(r)
    clock.now += 9
    r.done(0)
    clock.now += 9
    r.turn()
    assert r.ended == {"stuck": False} and r.g.current.number == 1


def test_readers_keep_the_old_agent_for_a_while(clock: Clock) -> None:
    """A prefill worker's arena: peers may read through the old agent until it is closed."""
    r = Reader(serve=True)
    assert r.g.renew("asked for")
    reader = LoopbackTransport(r.network, "x/1/1", bytearray(TOTAL))

    def read(number: int) -> bool:
        name = f"d/1/{number}"
        arena = PeerArena("d", "1", number, 0, TOTAL, 16, 32, 16, 4, "DRAM", 0, name, name.encode())
        try:
            reader.connect(arena)
            return reader.poll(reader.post(arena.key, [ReadRange(0, 0, 8)]))
        except TransferError:
            return False

    clock.now += 4.9
    r.turn()
    assert read(1) and read(2)
    clock.now += 0.2
    r.turn()
    assert not read(1) and read(2)


def test_a_transport_that_cannot_progress_is_replaced(clock: Clock) -> None:
    r = Reader(serve=True)

    def broken() -> None:
        raise TransferError("worker is wedged")

    r.agents[1].progress = broken  # type: ignore[method-assign]
    r.g.progress()
    assert r.g.current.number == 2 and r.of(GenerationOpened)[0].why == "worker is wedged"
    r.g.progress()
    assert r.g.current.number == 2
    alone = Generations(r.transport(9), r.events.append, serve=True)
    alone.current.transport.progress = broken  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="wedged"):
        alone.progress()


def test_disconnecting_reaches_every_generation(clock: Clock) -> None:
    r = Reader()
    r.pull("healthy", "q", 32)
    doom(r, size=128)
    r.g.disconnect(r.arenas["q"].key)
    r.pull("late", "q", 8)
    assert r.ended["late"] is False
    r.done(0)
    assert r.ended["healthy"] is True, "what was posted may end"


def test_memory_stays_doomed_until_the_agent_is_really_gone(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    r = Reader()
    close = r.agents[1].close

    def stays() -> None:
        raise TransferError("2 references to it are left")

    monkeypatch.setattr(r.agents[1], "close", stays)
    doom(r, size=128)
    monkeypatch.setattr(r.agents[1], "poll", lambda handle: 1 // 0)  # its handles are gone by now
    r.turn()
    assert r.g.current.number == 2 and not r.of(GenerationClosed) and not r.of(PullFinished)
    monkeypatch.setattr(r.agents[1], "close", close)
    clock.now += 6
    r.turn()
    assert r.of(GenerationClosed) == [GenerationClosed(1, 1, 128)] and r.ended == {"stuck": False}


def test_many_generations_leave_nothing_behind(clock: Clock) -> None:
    r = Reader()
    for k in range(200):
        doom(r, f"stuck-{k}", size=128)
        r.turn()
    assert r.g.current.number == 201
    assert len(r.of(GenerationClosed)) == 200
    assert sum(c.freed_bytes for c in r.of(GenerationClosed)) == 200 * 128
    assert set(r.network._arenas) == {"p/1/1", "q/1/1", "d/1/201"}


@pytest.fixture(autouse=True)
def every_pull_ends_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever happened: no pull is reported twice, and after `close` none is open."""
    made: list[Reader] = []
    build = Reader.__init__

    def note(self: Reader, **more: object) -> None:
        build(self, **more)  # type: ignore[arg-type]
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "__init__", note)
        yield
    for r in made:
        r.g.close("the end")
        ids = [e.pull_id for e in r.of(PullFinished)]
        assert len(ids) == len(set(ids))
        assert r.g.in_flight.posts == 0 and r.g.current.healthy_pulls == 0
