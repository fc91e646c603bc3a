"""Tokens do not wait until the view knows what else their message says."""

from collections.abc import Callable

import pytest

from services.router.dispatch import reports
from services.router.dispatch.reports import Reports
from services.router.view.prompt import PromptKeys
from services.router.view.view import View
from tests.router.dispatch.test_defects import Taker
from tests.router.view.test_index import BLOCK, IDS, RECORD, REMOVED, STORED, chain
from twinflow.contracts.events import EventColumns, EventKind
from twinflow.contracts.hashing import pack_tokens
from twinflow.rpc import convert
from twinflow.rpc.v1 import engine_pb2 as pb


def events(first: int, *what: tuple[EventKind, int]) -> list[pb.CacheEvent]:
    """`what`: kinds and blocks of `IDS`."""
    hashes = chain(IDS).block_hashes
    return [
        pb.CacheEvent(sequence=first + i, kind=kind.name.lower(), prefix_hash=hashes[at], position=(at + 1) * BLOCK)
        for i, (kind, at) in enumerate(what)
    ]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is few, two are not."""
    monkeypatch.setattr(reports, "FEW_EVENTS", 1)


class Router:
    """Reports of one worker; `waiting` is what is to be done later."""

    def __init__(self, columns: bool = False) -> None:
        self.columns = columns
        self.view, self.taker, self.waiting = View(), Taker(), list[Callable[[], None]]()
        self.resyncs = 0
        self.view.put(RECORD)
        self.view.set_connected(RECORD.key, True)
        self.reports = Reports(RECORD, self.view, {"a": self.taker}, self._resync, later=self.waiting.append)

    def _resync(self) -> None:
        self.resyncs += 1

    def step(self, told: list[pb.CacheEvent], token: int, load: pb.Load | None = None) -> None:
        step = pb.StepReport(token_requests=["a"], token_ids=[token], load=load)
        if self.columns:
            step.event_columns.CopyFrom(convert.event_columns_to_pb(EventColumns.of(convert.events_from_pb(told))))
        else:
            step.events.extend(told)
        self.reports.handle(pb.WorkerMessage(step=step))

    def reach(self) -> int:
        return self.view.snapshot(PromptKeys(pack_tokens(IDS))).workers[0].attention_tokens


@pytest.mark.parametrize("columns", [False, True], ids=["events", "columns"])
def test_events_come_after_the_tokens_in_their_order(columns):
    r = Router(columns)
    r.step(events(1, (STORED, 0), (STORED, 1), (STORED, 2)), 7)
    r.step(events(4, (REMOVED, 2)), 8)
    assert r.taker.got == [7, 8] and r.reach() == 0
    assert len(r.waiting) == 1  # for both
    r.waiting.pop()()
    assert r.reach() == 2 * BLOCK and not r.resyncs
    r.step(events(5, (STORED, 2), (STORED, 3)), 9)
    r.waiting.pop()()
    assert r.reach() == 4 * BLOCK


@pytest.mark.parametrize("columns", [False, True], ids=["events", "columns"])
def test_few_events_come_at_once_unless_others_wait(columns):
    r = Router(columns)
    r.step(events(1, (STORED, 0)), 7)
    assert r.reach() == BLOCK and not r.waiting


def test_somebody_who_waits_for_a_first_token_has_it_before_the_view_has_the_rest():
    r = Router()

    def running() -> int:
        return r.view.snapshot(PromptKeys(pack_tokens(IDS))).workers[0].record.load.running

    r.taker.begun = False
    r.step(events(1, (STORED, 0)), 7, pb.Load(running=3))
    assert r.taker.got == [7] and (r.reach(), running()) == (0, 0)
    r.taker.begun = True
    r.step([], 8, pb.Load(running=4))
    assert running() == 0, "in order"
    assert len(r.waiting) == 1  # for both
    r.waiting.pop()()
    assert (r.reach(), running()) == (BLOCK, 4)
    r.step([], 9, pb.Load(running=5))
    assert running() == 5 and not r.waiting


def test_a_snapshot_comes_after_the_events_before_it():
    r = Router()
    r.step(events(1, (STORED, 0), (STORED, 1)), 7)
    contents = events(2, (STORED, 0))
    r.reports.handle(pb.WorkerMessage(snapshot=pb.Snapshot(sequence=2, events=contents)))
    assert r.reach() == BLOCK
    r.waiting.pop()()
    assert r.reach() == BLOCK and not r.resyncs


def test_a_gap_asks_for_a_snapshot_once():
    r = Router()
    r.step(events(5, (STORED, 0), (STORED, 1)), 7)
    r.step(events(7, (STORED, 2)), 8)
    r.waiting.pop()()
    assert r.resyncs == 1 and r.taker.got == [7, 8]
