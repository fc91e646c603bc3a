"""Cache events in columns, of a worker of this release, say what the same events say one by one, of an earlier one."""

import logging
import random
from collections.abc import Sequence

import pytest

from services.router.dispatch.reports import Reports
from services.router.view.prompt import PromptKeys
from services.router.view.view import View
from tests.router.view.test_index import DROPPED, IDS, RECORD, REMOVED, SAVED, STORED, chain, stored
from twinflow.contracts.events import CacheEvent, EventColumns
from twinflow.contracts.hashing import pack_tokens
from twinflow.rpc import convert
from twinflow.rpc.v1 import engine_pb2 as pb

BLOCK = RECORD.block_tokens
FORMS = ["columns", "events", "single-events"]


class Router:
    """Reports of one worker, told in one form."""

    def __init__(self, form: str) -> None:
        self.form, self.view, self.resyncs = form, View(), 0
        self.view.put(RECORD)
        self.view.set_connected(RECORD.key, True)
        self.reports = Reports(RECORD, self.view, {}, self._resync)

    def _resync(self) -> None:
        self.resyncs += 1

    @property
    def feed(self):
        return self.view._workers[RECORD.key].feed

    def step(self, events: Sequence[CacheEvent]) -> None:
        if self.form == "columns":
            self.say(step=pb.StepReport(event_columns=columns(events)))
        elif self.form == "events":
            self.say(step=pb.StepReport(events=map(convert.event_to_pb, events)))
        else:
            for event in events:
                self.say(step=pb.StepReport(events=[convert.event_to_pb(event)]))

    def snapshot(self, sequence: int, contents: Sequence[CacheEvent]) -> None:
        said = pb.Snapshot(sequence=sequence)
        if self.form == "columns":
            said.event_columns.CopyFrom(columns(contents))
        else:
            said.events.extend(map(convert.event_to_pb, contents))
        self.say(snapshot=said)

    def say(self, **message: object) -> None:
        wire = pb.WorkerMessage(**message).SerializeToString()
        self.reports.handle(pb.WorkerMessage.FromString(wire))

    def holds(self, ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        (worker,) = self.view.snapshot(PromptKeys(pack_tokens(ids)), detail=True).workers
        return worker.attention_tokens, worker.checkpoints


def columns(events: Sequence[CacheEvent]) -> pb.EventColumns:
    return convert.event_columns_to_pb(EventColumns.of(events))


@pytest.mark.parametrize("seed", range(12))
def test_all_forms_leave_the_same_index(seed: int) -> None:
    """Batches of all lengths; some are lost, come twice, late or with a snapshot between."""
    draw, routers = random.Random(seed), [Router(form) for form in FORMS]
    prompts = [[*range(9), *(draw.randrange(2) for _ in range(draw.randrange(9, 400)))] for _ in range(4)]
    names = [(c.prefix_hash(at), at) for c in map(chain, prompts) for at in range(BLOCK, len(c), draw.choice([2, 4]))]
    sequence, held, sent = 0, set[tuple[int, bytes, int]](), list[list[CacheEvent]]()
    for _ in range(40):
        batch = list[CacheEvent]()
        for _ in range(draw.choice([1, 2, 3, 30, 200])):
            sequence += 1
            name, at = draw.choice(names)
            kind = draw.choice([SAVED, SAVED, DROPPED] if at % BLOCK else [STORED, STORED, REMOVED, SAVED])
            (held.add if kind in (STORED, SAVED) else held.discard)(
                ({REMOVED: STORED, DROPPED: SAVED}.get(kind, kind), name, at)
            )
            batch.append(CacheEvent(sequence, kind, name, at))
        sent.append(batch)
        match draw.randrange(10):
            case 0:
                told = []  # lost
            case 1:
                told = [batch, draw.choice(sent)]
            case 2:
                told = [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
            case _:
                told = [batch]
        for router in routers:
            for events in told:
                router.step(events)
        if draw.random() < 0.2:
            contents = [CacheEvent(sequence, *entry) for entry in sorted(held)]
            for router in routers:
                router.snapshot(sequence, contents)
        first, *others = [(r.feed.sequence, r.feed.has_gap, len(r.feed), r.resyncs) for r in routers]
        assert others == [first, first]
        for ids in prompts:
            first, *others = [r.holds(ids) for r in routers]
            assert others == [first, first]


def test_a_gap_asks_for_a_snapshot_which_closes_it():
    r, events = Router("columns"), stored(IDS)
    r.step(events[:2])
    r.step(events[3:])
    assert r.resyncs == 1 and r.feed.has_gap and r.holds(IDS)[0] == 2 * BLOCK
    r.snapshot(4, [*events[:4]])
    assert not r.feed.has_gap and r.feed.sequence == 5 and r.holds(IDS)[0] == 5 * BLOCK


def test_a_new_session_starts_empty():
    r = Router("columns")
    r.step(stored(IDS))
    r.view.set_connected(RECORD.key, True)
    assert r.holds(IDS)[0] == 0 and r.feed.sequence == 0


@pytest.mark.parametrize("kind", [0, 5, 255])
@pytest.mark.parametrize("how", ["step", "snapshot"])
def test_a_kind_of_a_newer_release_is_passed_over_alone(caplog, how, kind):
    """It counts: what comes after it is no gap."""
    r, events = Router("columns"), stored(IDS)
    events[1:1] = [CacheEvent(2, kind, b"?" * 16, 7)]
    events = [e._replace(sequence=i + 1) for i, e in enumerate(events)]
    for _ in range(2):  # told once
        r.step(events) if how == "step" else r.snapshot(6, events)
    r.step([CacheEvent(7, REMOVED, events[-1].prefix_hash, 5 * BLOCK)])
    assert r.holds(IDS)[0] == 4 * BLOCK and r.feed.sequence == 7 and not r.resyncs
    assert caplog.text.count("cache events of worker w are passed over") == 1
    assert f"unknown event kinds [{kind}]" in caplog.text


BAD = {
    "more-kinds": {"kinds": bytes([STORED] * 3)},
    "no-kinds": {"kinds": b""},
    "more-hashes": {"prefix_hashes": b"h" * 48},
    "half-a-hash": {"prefix_hashes": b"h" * 31},
    "more-positions": {"positions": bytes(12)},
    "half-a-position": {"positions": bytes(7)},
}


@pytest.mark.parametrize("many", [1, 100], ids=["few", "many"])
@pytest.mark.parametrize("how", ["step", "snapshot"])
@pytest.mark.parametrize("bad", BAD)
def test_columns_that_do_not_match_cost_hints_alone(caplog, bad, how, many):
    """All of that message's are passed over, and the next ones show that some are missing."""
    r = Router("columns")
    fields = {"first_sequence": 1, "kinds": bytes([STORED] * 2), "prefix_hashes": b"h" * 32, "positions": bytes(8)}
    for name in ("kinds", "prefix_hashes", "positions"):
        fields[name] = fields[name] * (many - 1) + BAD[bad].get(name, fields[name])
    said = pb.EventColumns(**fields)
    with caplog.at_level(logging.WARNING):
        r.say(**({"step": pb.StepReport(event_columns=said)} if how == "step" else
                 {"snapshot": pb.Snapshot(sequence=2 * many, event_columns=said)}))  # fmt: skip
    assert len(r.feed) == r.feed.sequence == 0 and "columns of cache events do not match" in caplog.text
    r.step([CacheEvent(2 * many + 1, STORED, b"i" * 16, BLOCK)])
    assert r.resyncs == 1


def test_numbers_at_the_end_of_their_range_are_no_more_than_a_gap():
    r = Router("columns")
    last = [CacheEvent(2**64 - 1, STORED, b"h" * 16, BLOCK), CacheEvent(2**64, STORED, b"i" * 16, 2**32 - 1)]
    r.step(last)
    assert (r.resyncs, len(r.feed), r.feed.has_gap) == (1, 0, True)
