"""The index against random operation sequences, gaps and snapshots; hits against the definition."""

import random

import pytest

from services.router.view.index import WorkerIndex
from services.router.view.prompt import PromptKeys
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash
from twinflow.contracts.hits import usable_tokens
from twinflow.contracts.workers import Role, WorkerRecord

BLOCK = 4
RECORD = WorkerRecord("w", "i", Role.DECODE, ("a:1",), "m", "f", 4096, 2048, BLOCK)
STORED, REMOVED = EventKind.BLOCK_STORED, EventKind.BLOCK_REMOVED
SAVED, DROPPED = EventKind.CHECKPOINT_STORED, EventKind.CHECKPOINT_REMOVED


def chain(ids: list[int], salt: str = "") -> TokenChain:
    return TokenChain(root_hash("f", "", salt), BLOCK, pack_tokens(ids))


def stored(ids: list[int], first: int = 1) -> list[CacheEvent]:
    c = chain(ids)
    return [CacheEvent(first + i, STORED, h, (i + 1) * BLOCK) for i, h in enumerate(c.block_hashes)]


def saved(ids: list[int], position: int, sequence: int) -> CacheEvent:
    return CacheEvent(sequence, SAVED, chain(ids).prefix_hash(position), position)


def hits(index: WorkerIndex, ids: list[int], salt: str = ""):
    attention, state = index.hits(RECORD, PromptKeys(pack_tokens(ids), cache_salt=salt))
    return attention.tokens, state.checkpoints


IDS = list(range(100, 120))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (IDS, (20, (8,))),
        (IDS[:11], (8, (8,))),
        ([*IDS[:9], 1, 2, 3], (8, (8,))),
        ([*IDS[:5], 1, 2, 3], (4, ())),
        ([1, *IDS], (0, ())),
        (IDS[:3], (0, ())),
    ],
    ids=["all", "mid-block", "branch", "branch-before", "shifted", "short"],
)
def test_hits_are_contiguous_from_the_start(prompt, expected):
    index = WorkerIndex()
    index.apply([*stored(IDS), saved(IDS, 8, 6)])
    assert hits(index, prompt) == expected


def test_a_hole_ends_the_reach():
    index = WorkerIndex()
    events = stored(IDS)
    index.apply([*events, CacheEvent(6, REMOVED, events[1].prefix_hash, 8), saved(IDS, 16, 7)])
    assert hits(index, IDS) == (4, ())


def test_a_checkpoint_inside_a_block_brings_its_tail():
    index = WorkerIndex()
    index.apply([*stored(IDS[:8]), saved(IDS, 10, 3), saved(IDS, 3, 4)])
    assert hits(index, IDS) == (10, (10,))
    assert hits(index, IDS[:10]) == (8, (3,))  # the whole prompt is no use: its last token must run
    assert usable_tokens(index.hits(RECORD, PromptKeys(pack_tokens(IDS))), 20) == 10


def test_salt_separates():
    index = WorkerIndex()
    index.apply(stored(IDS))
    assert hits(index, IDS, salt="other") == (0, ())


def test_gap_holds_back_until_a_snapshot():
    index = WorkerIndex()
    events = stored(IDS)
    assert not index.apply(events[:2])
    assert index.apply(events[3:])  # 3 is missing: ask
    assert not index.apply([saved(IDS, 8, 6)])  # asked already
    assert hits(index, IDS) == (8, ())
    assert not index.replace(4, events[:4])
    assert hits(index, IDS) == (20, (8,)) and index.sequence == 6


def test_late_event_closes_the_gap_by_itself():
    index = WorkerIndex()
    events = stored(IDS)
    assert index.apply([events[0], events[2]])
    index.apply([events[1]])
    assert not index.has_gap and hits(index, IDS)[0] == 12


def test_old_snapshots_and_repeated_events_change_nothing():
    index = WorkerIndex()
    index.apply(stored(IDS))
    assert not index.replace(2, [])
    index.apply(stored(IDS)[:1])
    assert hits(index, IDS)[0] == 20


def test_a_snapshot_before_the_gap_leaves_it_open():
    index = WorkerIndex()
    events = stored(IDS)
    index.apply([events[0], events[4]])
    assert index.replace(2, events[:2])
    assert not index.replace(4, events[:4])


def test_bounded_oldest_out():
    index = WorkerIndex(max_entries=3)
    index.apply([*stored(IDS), *[saved(IDS, p, 6 + p) for p in range(6)]])
    assert len(index) == 6
    assert hits(index, IDS) == (3, (3,))  # blocks 0 and 1 are out, checkpoints 3, 4 and 5 are in


@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed):
    """Against a plain set; events shuffled within a window never lose anything."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3) for _ in range(draw.randrange(4, 24))] for _ in range(6)]
    blocks: set[bytes] = set()
    points: dict[bytes, int] = {}
    events: list[CacheEvent] = []
    for sequence in range(1, 200):
        ids = draw.choice(prompts)
        position = draw.randrange(1, len(ids) + 1)
        kind = draw.choice(list(EventKind))
        if kind in (STORED, REMOVED):
            position = position // BLOCK * BLOCK or BLOCK
        key = chain(ids).prefix_hash(position)
        {STORED: blocks.add, REMOVED: blocks.discard}.get(kind, lambda _: None)(key)
        if kind is SAVED:
            points[key] = position
        elif kind is DROPPED:
            points.pop(key, None)
        events.append(CacheEvent(sequence, kind, key, position))
    index = WorkerIndex()
    while events:
        n = draw.randrange(1, 5)
        window, events = events[:n], events[n:]
        draw.shuffle(window)
        index.apply(window)
    assert len(index) == len(blocks) + len(points) and index.sequence == 199
    for ids in prompts:
        c = chain(ids)
        reach = 0
        while (reach + 1) * BLOCK <= len(ids) and c.block_hashes[reach] in blocks:
            reach += 1
        last = min(reach * BLOCK + BLOCK, len(ids)) - 1
        at_blocks = [p for p in range(BLOCK, reach * BLOCK + 1, BLOCK) if c.prefix_hash(p) in points]
        inside = [p for p in range(max(at_blocks, default=0) + 1, last + 1) if p % BLOCK and c.prefix_hash(p) in points]
        expected = tuple(at_blocks + inside[-1:])
        assert hits(index, ids) == (max(reach * BLOCK, *inside[-1:], 0), expected)
