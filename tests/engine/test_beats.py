"""An engine's process says that it runs, beside its reports and whatever its loop waits for."""

import ctypes
import errno
import multiprocessing
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from twinflow.engine.base import Beat
from twinflow.engine.beats import BEAT_S, Voice, unread_bytes
from twinflow.engine.silence import LOOK_S, EngineSilence
from twinflow.node.pulse import ENGINE_SILENCE_S

MUCH = "x" * (1 << 22)  # far more than a pipe holds


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def until(condition: object) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.001)


def test_beats_come_between_reports(ends: tuple[Connection, Connection]) -> None:
    voice = Voice(ends[0])
    for thing in ("one", "two"):
        assert voice.beat()
        voice.send(thing)
        assert (ends[1].recv(), ends[1].recv()) == (Beat(), thing)


def test_a_front_that_does_not_read_has_at_most_one_beat_to_read(ends: tuple[Connection, Connection]) -> None:
    """So that its engine can say as much as ever before it has to wait."""
    voice = Voice(ends[0])
    for _ in range(1000):
        assert voice.beat()
    voice.send("a report")
    for _ in range(1000):
        assert voice.beat(), "the report will say that it runs"
    assert [ends[1].recv(), ends[1].recv()] == [Beat(), "a report"]
    assert not ends[1].poll()
    assert voice.beat() and ends[1].recv() == Beat(), "it goes on once all is read"


def test_a_kernel_that_does_not_say_what_is_unread_gets_beats_all_the_same(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> bytes:
        raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    monkeypatch.setattr("twinflow.engine.beats.fcntl.ioctl", refused)
    voice = Voice(ends[0])
    assert voice.beat() and voice.beat()
    assert [ends[1].recv(), ends[1].recv()] == [Beat(), Beat()]
    ends[1].close()
    assert not voice.beat()


def test_a_report_that_fills_the_pipe_stays_whole_and_a_beat_waits_for_nobody(
    ends: tuple[Connection, Connection],
) -> None:
    voice = Voice(ends[0])
    loop = threading.Thread(target=lambda: [voice.send((i, MUCH)) for i in range(3)])
    loop.start()
    until(lambda: unread_bytes(ends[0]) > 1000)  # it stands amid the first one
    for _ in range(1000):
        assert voice.beat()  # returns
    assert loop.is_alive()
    got = []
    while len([g for g in got if g != Beat()]) < 3:
        got.append(ends[1].recv())
        voice.beat()
    loop.join()
    assert [g for g in got if g != Beat()] == [(i, MUCH) for i in range(3)]


def test_two_threads_at_once_lose_and_mix_nothing(ends: tuple[Connection, Connection]) -> None:
    voice, over = Voice(ends[0]), threading.Event()

    def beats() -> None:
        while not over.is_set():
            voice.beat()

    def reports() -> None:
        for i in range(2000):
            voice.send((i, "x" * (i * 37 % 3000)))

    threads = [threading.Thread(target=work) for work in (beats, reports)]
    for thread in threads:
        thread.start()
    got = []
    while len(got) < 2000:
        said = ends[1].recv()
        if said != Beat():
            got.append(said)
    over.set()
    for thread in threads:
        thread.join()
    assert got == [(i, "x" * (i * 37 % 3000)) for i in range(2000)]


def test_a_loop_that_computes_does_not_keep_beats_back(ends: tuple[Connection, Connection]) -> None:
    beats = threading.Thread(target=Voice(ends[0]).beat_until_closed)
    got: list[object] = []
    front = threading.Thread(target=lambda: [got.append(ends[1].recv()) for _ in range(4)])
    beats.start()
    front.start()
    deadline = time.monotonic() + 20
    while len(got) < 4:  # in Python, without a pause
        assert time.monotonic() < deadline
    assert got == [Beat()] * 4
    ends[1].close()
    for thread in (beats, front):
        thread.join(10)
        assert not thread.is_alive()


def engine_that_waits(pipe: Connection) -> None:
    """In a call that keeps the interpreter, then in one that gives it back, as a long step does."""
    voice = Voice(pipe)
    threading.Thread(target=voice.beat_until_closed, daemon=True).start()
    voice.send("keeps it")
    ctypes.PyDLL(None).usleep(int(6 * BEAT_S * 1e6))
    voice.send("gives it back")
    pipe.recv()


def test_who_keeps_the_interpreter_is_silent_and_who_waits_is_not() -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=engine_that_waits, args=(theirs,))
    engine.start()
    said: list[object] = []
    while said.count(Beat()) < 4 or said[-1] != Beat():
        assert ours.poll(30)
        said.append(ours.recv())
    ours.send("go on")
    engine.join(30)
    assert engine.exitcode == 0
    kept, gave = said.index("keeps it"), said.index("gives it back")
    assert said[kept:gave].count(Beat()) <= 1, "it beat before the call began, at most"
    assert said[gave:].count(Beat()) >= 2


@pytest.mark.parametrize("closed", [0, 1], ids=["here", "there"])
def test_the_thread_ends_with_the_pipe(ends: tuple[Connection, Connection], closed: int) -> None:
    thread = threading.Thread(target=Voice(ends[0]).beat_until_closed)
    thread.start()
    assert ends[1].recv() == Beat()
    ends[closed].close()
    thread.join(10)
    assert not thread.is_alive()


class Ears:
    """A front with a clock of its own. `said` is when the engine was heard last."""

    def __init__(self) -> None:
        self.now = self.said = 100.0
        self.changes: list[bool] = []
        self.silence = EngineSilence(lambda: self.now - self.said, lambda: self.now)
        self.silence.listeners.append(self.changed)

    def changed(self) -> None:
        self.changes.append(self.silence.lasts)

    def wait(self, seconds: float, heard: bool = False) -> None:
        """Looks as often as it should."""
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            if heard:
                self.said = self.now
            self.silence.look()

    def held_up(self, seconds: float) -> None:
        """It neither looks nor reads for so long, and then looks before it reads."""
        self.now += LOOK_S + seconds
        self.silence.look(seconds)


def test_silence_is_told_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    ears = Ears()
    ears.wait(10, heard=True)
    assert (ears.silence.silent_s, ears.changes) == (0.0, [])
    ears.wait(ENGINE_SILENCE_S - LOOK_S)
    assert ears.changes == []
    ears.wait(5)
    assert ears.changes == [True]
    assert ears.silence.silent_s == pytest.approx(ENGINE_SILENCE_S - LOOK_S + 5)
    ears.wait(1, heard=True)
    assert ears.changes == [True, False]
    said = [r.message for r in caplog.records]
    assert said == [
        "the engine's process has said nothing for 2.0 s",
        "the engine's process is heard again, after 6.8 s at least",
    ]


def test_a_front_that_was_held_up_blames_nobody() -> None:
    ears = Ears()
    ears.wait(1, heard=True)
    ears.held_up(60)
    ears.wait(1)
    assert ears.changes == [] and ears.silence.silent_s == pytest.approx(1 + LOOK_S)
    ears.wait(1, heard=True)
    ears.held_up(60)
    ears.held_up(60)
    assert ears.changes == []


def test_what_it_was_held_up_for_delays_the_finding_and_no_more() -> None:
    ears = Ears()
    ears.wait(1)
    ears.held_up(3)
    ears.wait(ENGINE_SILENCE_S - 1 - 2 * LOOK_S)
    assert ears.changes == []
    ears.wait(LOOK_S)
    assert ears.changes == [True]
    ears.held_up(3)
    assert ears.changes == [True], "it is not taken back by being held up"


def test_an_excuse_ends_with_the_silence_that_it_was_for() -> None:
    ears = Ears()
    ears.wait(1)
    ears.held_up(30)
    ears.wait(1, heard=True)
    ears.wait(ENGINE_SILENCE_S)
    assert ears.changes == [True]
