"""The engine's thread: which reports go out at once, and which wait for a lull."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from twinflow.cache.base import PoolCounts
from twinflow.contracts.events import EventColumns
from twinflow.contracts.requests import RequestStats
from twinflow.contracts.workers import Load
from twinflow.engine import base, loop
from twinflow.engine.base import Report, Work

QUIET = Report((), EventColumns.of(()), Load(), {"attention": PoolCounts(8, 8, 0, 0, 0, 0)}, Work())
TOLD = replace(QUIET, notices=(base.Done("a", RequestStats()),))
STEPPED = replace(QUIET, work=Work(1))


class Scripted:
    """An engine that answers a turn with the report it is sent in place of commands, and `None` with none."""

    def __init__(self) -> None:
        self.stopping = self.busy = False
        self.idle = True
        self.turns: list[int] = []

    def turn(self, inbound: list[Report | str]) -> Report | None:
        self.turns.append(len(inbound))
        self.stopping = "stop" in inbound
        reports = [r for r in inbound if isinstance(r, Report)]
        return reports[-1] if reports else None


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Report, int]]]:
    """Puts these one after the other, each once the one before was taken; returns the reports with how many turns there were."""
    monkeypatch.setattr(loop, "LULL_S", 0.2)

    def run(*inbound: Report | str, pause_s: float = 0.0, busy: bool = False) -> list[tuple[Report, int]]:
        engine, inbox = Scripted(), queue.SimpleQueue()  # type: ignore[var-annotated]
        sent: list[tuple[Report, int]] = []
        thread = threading.Thread(
            target=loop.run_loop,
            args=(engine, inbox, lambda r: sent.append((replace(r, busy_s=0.0), sum(engine.turns)))),
        )
        engine.busy = busy
        thread.start()
        for n, one in enumerate(inbound, 1):
            inbox.put(one)
            while sum(engine.turns) < n:
                time.sleep(0.001)
        time.sleep(pause_s)
        inbox.put("stop")
        thread.join(10)
        return sent

    return run


def test_what_was_told_goes_at_once(run: Callable[..., list[tuple[Report, int]]]) -> None:
    assert run(TOLD, STEPPED) == [(TOLD, 1), (STEPPED, 2)]


def test_other_counts_wait_for_a_lull(run: Callable[..., list[tuple[Report, int]]]) -> None:
    assert run(QUIET, pause_s=0.6) == [(QUIET, 1)]


def test_other_counts_are_said_with_what_comes_next(run: Callable[..., list[tuple[Report, int]]]) -> None:
    assert run(QUIET, replace(QUIET, load=Load(running=1)), TOLD) == [(TOLD, 3)]


def test_a_command_that_changes_nothing_loses_no_report(run: Callable[..., list[tuple[Report, int]]]) -> None:
    assert run(QUIET, "nothing", pause_s=0.6) == [(QUIET, 2)]


def test_nothing_waits_while_steps_run(run: Callable[..., list[tuple[Report, int]]]) -> None:
    assert run(QUIET, busy=True) == [(QUIET, 1)]
