"""The harness itself: what it does to connections, and that it finds what must not be."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.cli.memory import tree
from tests.chaos.engines import SPAWNED, command_of, engine_of
from tests.chaos.load import HUNG, LOST, Exchange, Question
from tests.chaos.proxy import OTHER, Proxy, owner
from tests.chaos.quiet import Left
from tests.chaos.report import Exit, Happened, Report
from tests.chaos.runner import AFTERWARDS_S, LATEST_S, noticeable_s
from tests.chaos.schedule import DECK, SLOWED, UNPLUGGED, WORKERS, Fault, Kind, Point, schedule
from tests.chaos.watch import Line, Watch

QUESTION = Question([1, 2], 3, "a b c")
FAULT = Fault(Kind.PAUSE, ("prefill-0",), Point.ANY, delay_s=0.0, lasts_s=4.0, rest_s=1.0)


# ---- the schedule ----


def test_a_seed_decides_everything() -> None:
    assert schedule(7, 50) == schedule(7, 50)
    assert schedule(7, 50) != schedule(8, 50)


def test_every_kind_comes_once_before_any_comes_again() -> None:
    faults = schedule(1, 2 * len(DECK))
    for part in (faults[: len(DECK)], faults[len(DECK) :]):
        assert len({f.group for f in part}) == len(DECK)
    assert {v for f in faults for v in f.victims} <= {"router", *WORKERS}


def test_only_a_process_that_is_read_from_can_fail_amid_a_read() -> None:
    deck = (*DECK, *UNPLUGGED, *SLOWED)
    amid = {f.group for f in schedule(1, 30 * len(deck), deck=deck) if f.point is Point.READING}
    assert amid == {"kill prefill", "pause prefill", "freeze prefill", "unplug prefill"}


# ---- the proxy ----


@pytest.fixture
async def proxy() -> AsyncIterator[tuple[Proxy, int]]:
    """In front of a server that sends back what it gets; connections from this process are those of "me"."""

    writers = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    listening = socket.create_server(("127.0.0.1", 0))
    made = Proxy(listening, server.sockets[0].getsockname()[:2], lambda: {"me": os.getpid()})
    await made.start()
    yield made, listening.getsockname()[1]
    await made.close()
    server.close()
    for writer in writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ask(ends: tuple[asyncio.StreamReader, asyncio.StreamWriter], text: bytes, within_s: float = 5.0) -> bytes:
    ends[1].write(text)
    return await asyncio.wait_for(ends[0].read(100), within_s)


async def closed(ends: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    try:
        return await ask(ends, b"is anybody there?") == b""
    except ConnectionError:
        return True


async def test_a_stalled_link_delivers_late_and_loses_nothing(proxy: tuple[Proxy, int]) -> None:
    made, port = proxy
    ends = await asyncio.open_connection("127.0.0.1", port)
    assert await ask(ends, b"one") == b"one"
    made.link("me").stall()
    with pytest.raises(TimeoutError):
        await ask(ends, b"two", 0.3)
    made.link("me").heal()
    assert await ask(ends, b"") == b"two"
    ends[1].close()


async def test_a_cut_link_takes_no_connection_until_it_is_healed(proxy: tuple[Proxy, int]) -> None:
    made, port = proxy
    ends = await asyncio.open_connection("127.0.0.1", port)
    assert await ask(ends, b"one") == b"one"
    made.link("me").cut()
    for again in (ends, await asyncio.open_connection("127.0.0.1", port)):
        assert await closed(again)
        again[1].close()
    made.link("me").heal()
    ends = await asyncio.open_connection("127.0.0.1", port)
    assert await ask(ends, b"three") == b"three"
    ends[1].close()


async def test_one_clients_link_is_not_anothers(proxy: tuple[Proxy, int]) -> None:
    made, port = proxy
    made.link("somebody else").cut()
    ends = await asyncio.open_connection("127.0.0.1", port)
    assert await ask(ends, b"one") == b"one"
    assert made.link("me").connections == 1
    assert owner(ends[1].get_extra_info("sockname")[:2], {"nobody": 2**22 - 1}) == OTHER
    ends[1].close()


# ---- the checker ----


def exchange(text: str = "a b c", *, tokens: int | None = 3, error: str = "", began: float = 100.0) -> Exchange:
    return Exchange(QUESTION, began, [began + 0.5], began + 1.0, text, tokens, error)


def good() -> Report:
    report = Report(1, happened=[Happened(FAULT, 100.0, 104.0, 3.1)], quiet=[Left()], handed_off=1)
    report.exchanges = [exchange(), exchange("a b", tokens=None, error="worker_lost")]
    return report


def test_a_good_run_has_no_defects() -> None:
    assert good().defects() == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (exchange("a b x"), "wrong answer"),
        (exchange("a b"), "wrong answer"),
        (exchange(tokens=2), "wrong answer"),
        (exchange("b", error="worker_lost"), "wrong answer"),
        (exchange("a", error=HUNG), "hung"),
        (exchange("a", error="internal"), "unclear error internal"),
        (exchange("a", error=LOST), f"{LOST} without a fault"),
        (exchange("a", error="worker_lost", began=200.0), "worker_lost without a fault"),
    ],
    ids=["another", "short", "fewer tokens", "wrong before an error", "hung", "internal", "lost", "unexplained"],
)
def test_a_bad_exchange_is_found(bad: Exchange, says: str) -> None:
    report = good()
    report.exchanges.append(bad)
    assert [d for d in report.defects() if says in d]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.quiet.append(Left(blocks=1)), "left behind"),
        (lambda r: r.quiet.append(Left(slots=1)), "left behind"),
        (lambda r: r.quiet.append(Left(doomed=1)), "left behind"),
        (lambda r: r.quiet.append(Left(leases=1)), "left behind"),
        (lambda r: r.quiet.append(Left(silent=("decode-0",))), "left behind"),
        (lambda r: r.exits.append(Exit("decode-0", 1, ("why",))), "decode-0 ended with 1: why"),
        (lambda r: r.trouble.append(Line(1.0, "decode-0", "ERROR it")), "decode-0 logs"),
        (lambda r: setattr(r, "handed_off", 0), "no answer came through a hand-off"),
        (lambda r: r.not_back.append("prefill-0"), "not back: prefill-0"),
        (lambda r: r.happened.append(Happened(FAULT, 1.0, 5.0, 11.0)), "noticed only after 11.0 s"),
        (lambda r: setattr(r, "happened", [Happened(FAULT, 1.0, 5.5)] * 3), "do they reach anybody?"),
    ],
    ids=[
        "block",
        "slot",
        "doomed",
        "lease",
        "silent worker",
        "exit",
        "log",
        "no hand-off",
        "not back",
        "late",
        "nobody notices",
    ],
)
def test_a_bad_state_is_found(change: object, says: str) -> None:
    report = good()
    change(report)  # type: ignore[operator]
    assert [d for d in report.defects() if says in d]


def test_an_abort_of_the_transport_counts_apart() -> None:
    report = good()
    said = "[vm:1:2:3] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout"
    report.exits.append(Exit("prefill-0", 1, ("x", said, "the engine process died")))
    assert report.defects() == []
    assert "| processes ended by their transport | 1 |" in report.lines()


def test_a_recovery_is_counted_where_nothing_came_into_it() -> None:
    report = good()
    report.happened = [
        Happened(FAULT, 1.0, 5.0, noticed_s=3.0, went_on_s=9.0),
        Happened(FAULT, 20.0, 25.0, noticed_s=3.0, went_on_s=9.0, cut_short=True),
    ]
    assert [h.recovered_s for h in report.happened] == [6.0, None]
    assert report.slow == report.happened[:1]
    assert "| recoveries that took longer than 5 s | 1 of 1 |" in report.lines()


def test_nothing_goes_on_before_a_paused_router_does() -> None:
    paused = replace(FAULT, victims=("router",))
    assert Happened(paused, 10.0, 16.0, noticed_s=3.0, went_on_s=6.5).recovered_s == 0.5
    assert Happened(paused, 10.0, 12.0, noticed_s=3.0, went_on_s=6.5).recovered_s == 3.5


def test_waits_without_a_fault_are_told_beside() -> None:
    report = good()
    report.happened = [Happened(FAULT, 100.0, 104.0, 3.1, went_on_s=8.0, sought_at=98.0)]
    report.exchanges = [
        exchange(began=90.0),
        exchange(began=97.5),
        exchange(began=99.5),
        exchange(began=107.0),
        exchange(began=108.5),
    ]
    report.exchanges[-1].marks[:] = [110.0]
    report.exchanges[-1].ended = 110.5
    assert report.calm_waits_s == [0.5, 1.5]


def test_a_sign_is_a_token_or_the_end() -> None:
    one = Exchange(QUESTION, 10.0, [11.0, 11.5])
    assert one.sign_since(11.2) and not one.sign_since(11.5)
    one.ended = 11.4
    assert one.sign_since(11.5)


def test_a_wait_is_measured_from_the_fault() -> None:
    one = Exchange(QUESTION, 10.0, [11.0, 11.5, 16.0, 16.2], 16.3)
    assert one.silence_after(12.0, 10.0) == pytest.approx(4.0)
    assert one.silence_after(16.4, 10.0) == 0.0


FRONT = """
import multiprocessing, sys, time
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    context.Lock()  # starts a helper of multiprocessing's own
    print("alone", flush=True)
    sys.stdin.readline()
    engine = context.Process(target=time.sleep, args=(60,), daemon=True)
    engine.start()
    print(engine.pid, flush=True)
    sys.stdin.readline()
"""


def test_an_engine_is_told_from_its_front() -> None:
    """As a front spawns it, beside whatever else there is below it."""
    front = subprocess.Popen([sys.executable, "-c", FRONT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert front.stdin is not None and front.stdout is not None
    with front:
        assert front.stdout.readline() == "alone\n"
        assert len(tree(front.pid)) >= 2
        with pytest.raises(ProcessLookupError):
            engine_of(front.pid)
        print(file=front.stdin, flush=True)
        engine = int(front.stdout.readline())
        while SPAWNED not in command_of(engine):  # until it is another program
            time.sleep(0.01)
        assert engine_of(front.pid) == engine


@pytest.mark.parametrize(
    ("victims", "lines", "want"),
    [
        (("prefill-0",), [("router", "no session with worker prefill-0 at x: y")], 1.0),
        (("prefill-0",), [("decode-1", "session to prefill worker prefill-0/12ab at x is over: y")], 1.0),
        (("prefill-0",), [("router", "no session with worker prefill-1 at x: y")], None),
        (("router",), [("decode-1", "router router-1 is gone: y"), ("decode-0", "router router-1 is gone: y")], 2.0),
        (("router",), [("decode-1", "router router-2 connected"), ("decode-1", "router router-2 is gone: y")], None),
        (("router",), [("decode-1", "router router-1 is gone: y"), ("decode-1", "router router-2 connected")], 1.0),
        (("decode-0", "prefill-1"), [("prefill-1", "session with decode worker decode-0 is over: y")], 1.0),
        (("decode-0", "prefill-1"), [("decode-1", "session to prefill worker prefill-1/1 is over: y")], None),
    ],
    ids=[
        "router",
        "decode",
        "another worker",
        "the last of two",
        "a later session",
        "a session again",
        "link",
        "another link",
    ],
)
def test_who_noticed(victims: tuple[str, ...], lines: list[tuple[str, str]], want: float | None) -> None:
    watch, at = Watch(), time.monotonic()
    watch.lines = [Line(at + 1.0 + i, name, text) for i, (name, text) in enumerate(lines)]
    assert watch.noticed_s(replace(FAULT, victims=victims), at, 5.0) == (None if want is None else pytest.approx(want))


def test_who_noticed_that_an_engine_stands_still() -> None:
    """What its transport or its front do once it goes on, and others notice then, is another matter."""
    watch, at = Watch(), time.monotonic()
    said = [
        ("prefill-0", "the engine's process has said nothing for 2.0 s"),
        ("router", "worker prefill-1 is left alone: it has heard nothing"),
        ("router", "worker prefill-0 is left alone: it has heard nothing"),
        ("decode-1", "session to prefill worker prefill-0/12ab at x is over: y"),
    ]
    watch.lines = [Line(at + 1.0 + i, name, text) for i, (name, text) in enumerate(said)]
    assert watch.noticed_s(replace(FAULT, kind=Kind.FREEZE), at, 6.0) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("kind", "next_victim", "want_s"),
    [(Kind.PAUSE, "decode-0", 4.0 + AFTERWARDS_S), (Kind.PAUSE, "prefill-0", 4.5), (Kind.KILL, "decode-0", LATEST_S)],
    ids=["until it is over", "until the next", "a dead process, longer"],
)
def test_how_long_a_fault_can_be_noticed(kind: Kind, next_victim: str, want_s: float) -> None:
    first = Happened(replace(FAULT, kind=kind), 100.0, 104.0)
    then = Happened(replace(FAULT, victims=(next_victim,)), 104.5, 108.0)
    assert noticeable_s(first, [then]) == pytest.approx(want_s)
