"""Feeds and the index they share, against random operation sequences, gaps and snapshots; hits against the definition."""

import dataclasses
import random

import pytest

from services.router.view import feed
from services.router.view.feed import Feed
from services.router.view.index import CHECKPOINT, HitIndex, expected_states
from services.router.view.prompt import PromptKeys
from services.router.view.table import COLUMNS, FIRST_BUCKETS, ROW_BYTES, WAYS
from twinflow.contracts.checkpoints import INTERVAL_STATE_SHARE, checkpoint_positions
from twinflow.contracts.events import CacheEvent, EventColumns, EventKind
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash
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


class Cluster:
    """An index and feeds of some workers."""

    def __init__(self, workers: int = 1, max_bytes: int = 1 << 24) -> None:
        self.index = HitIndex(max_bytes)
        self.feeds = [Feed(self.index) for _ in range(workers)]

    def hits(self, ids: list[int], salt: str = "", worker: int = 0) -> tuple[int, tuple[int, ...]]:
        prompt = PromptKeys(pack_tokens(ids), cache_salt=salt)
        nobody, found = self.index.nobody(RECORD, prompt), self.index.holdings(RECORD, prompt, 0.0)
        assert not (nobody and (found.reach.any() or found.deepest.any()))
        column = self.feeds[worker].column
        assert column is not None
        return int(found.reach[column]), found.checkpoints(column)


IDS = list(range(100, 120))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


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
def test_hits_are_contiguous_from_the_start(cluster, prompt, expected):
    cluster.feeds[0].apply([*stored(IDS), saved(IDS, 8, 6)])
    assert cluster.hits(prompt) == expected


def test_a_hole_ends_the_reach(cluster):
    events = stored(IDS)
    cluster.feeds[0].apply([*events, CacheEvent(6, REMOVED, events[1].prefix_hash, 8), saved(IDS, 16, 7)])
    assert cluster.hits(IDS) == (4, ())


def test_a_checkpoint_inside_a_block_brings_its_tail(cluster):
    cluster.feeds[0].apply([*stored(IDS[:8]), saved(IDS, 10, 3), saved(IDS, 3, 4)])
    assert cluster.hits(IDS) == (10, (10,))
    assert cluster.hits(IDS[:10]) == (8, (3,))  # the whole prompt is no use: its last token must run


def test_salt_separates(cluster):
    cluster.feeds[0].apply(stored(IDS))
    assert cluster.hits(IDS, salt="other") == (0, ())


def test_workers_share_entries_and_not_hits():
    cluster = Cluster(workers=3)
    cluster.feeds[0].apply([*stored(IDS), saved(IDS, 8, 6)])
    cluster.feeds[1].apply(stored(IDS[:12]))
    assert len(cluster.index) == 6
    assert [cluster.hits(IDS, worker=w) for w in range(3)] == [(20, (8,)), (12, ()), (0, ())]
    assert [len(f) for f in cluster.feeds] == [6, 3, 0]


def test_gap_holds_back_until_a_snapshot(cluster):
    (feed,), events = cluster.feeds, stored(IDS)
    assert not feed.apply(events[:2])
    assert feed.apply(events[3:])  # 3 is missing: ask
    assert not feed.apply([saved(IDS, 8, 6)])  # asked already
    assert cluster.hits(IDS) == (8, ())
    assert not feed.replace(4, events[:4])
    assert cluster.hits(IDS) == (20, (8,)) and feed.sequence == 6


def test_a_snapshot_drops_what_it_does_not_name(cluster):
    (feed,) = cluster.feeds
    feed.apply(stored(IDS))
    assert not feed.replace(9, stored(IDS)[:2])
    assert cluster.hits(IDS) == (8, ()) and len(feed) == 2


def test_late_event_closes_the_gap_by_itself(cluster):
    (feed,), events = cluster.feeds, stored(IDS)
    assert feed.apply([events[0], events[2]])
    feed.apply([events[1]])
    assert not feed.has_gap and cluster.hits(IDS)[0] == 12


def test_old_snapshots_and_repeated_events_change_nothing(cluster):
    (feed,) = cluster.feeds
    feed.apply(stored(IDS))
    assert not feed.replace(2, [])
    feed.apply(stored(IDS)[:1])
    assert cluster.hits(IDS)[0] == 20


def test_a_snapshot_before_the_gap_leaves_it_open(cluster):
    (feed,), events = cluster.feeds, stored(IDS)
    feed.apply([events[0], events[4]])
    assert feed.replace(2, events[:2])
    assert not feed.replace(4, events[:4])


def test_columns_are_used_again_and_never_mix():
    """More incarnations than columns, one after the other: a new one never sees what an old one held."""
    cluster = Cluster(workers=COLUMNS)
    assert Feed(cluster.index).column is None  # known to hold nothing, no error
    for round in range(300):
        feed = cluster.feeds[round % COLUMNS]
        feed.apply(stored(IDS))
        feed.close()
        cluster.feeds[round % COLUMNS] = Feed(cluster.index)
        assert cluster.hits(IDS, worker=round % COLUMNS) == (0, ())
    assert len(cluster.index) in (0, 5)


def test_a_worker_without_a_column_only_counts_events():
    cluster = Cluster(workers=COLUMNS)
    late = Feed(cluster.index)
    assert not late.apply(stored(IDS)) and late.sequence == 5 and len(late) == 0
    cluster.feeds[3].close()
    assert not late.replace(5, stored(IDS))
    assert len(late) == 5


@pytest.mark.parametrize("many", [1, feed.MANY], ids=["arrays", "one-by-one"])
@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed, many, monkeypatch):
    """Two workers against plain sets; events shuffled within a window never lose anything."""
    monkeypatch.setattr(feed, "MANY", many)
    draw = random.Random(seed)
    prompts = [[draw.randrange(3) for _ in range(draw.randrange(4, 24))] for _ in range(6)]
    cluster = Cluster(workers=2)
    models = [Model(draw, prompts), Model(draw, prompts)]
    for _ in range(60):
        which = draw.randrange(2)
        window = models[which].events(draw.randrange(1, 9))
        if draw.random() < 0.5:
            cluster.feeds[which].apply(EventColumns.of(window))
        else:
            draw.shuffle(window)
            cluster.feeds[which].apply(window)
        if draw.random() < 0.2:
            for worker, model in enumerate(models):
                ids = draw.choice(prompts)
                assert cluster.hits(ids, worker=worker) == model.hits(ids)
    for worker, model in enumerate(models):
        assert len(cluster.feeds[worker]) == len(model.blocks) + len(model.points)
        assert cluster.feeds[worker].sequence == model.sequence
        for ids in prompts:
            assert cluster.hits(ids, worker=worker) == model.hits(ids)


class Model:
    """What one worker holds, in plain sets."""

    def __init__(self, draw: random.Random, prompts: list[list[int]]) -> None:
        self.draw, self.prompts, self.sequence = draw, prompts, 0
        self.blocks: set[bytes] = set()
        self.points: set[bytes] = set()

    def events(self, count: int) -> list[CacheEvent]:
        return [self.event() for _ in range(count)]

    def event(self) -> CacheEvent:
        self.sequence += 1
        ids, kind = self.draw.choice(self.prompts), self.draw.choice(list(EventKind))
        position = self.draw.randrange(1, len(ids) + 1)
        if kind in (STORED, REMOVED):
            position = position // BLOCK * BLOCK or BLOCK
        key = chain(ids).prefix_hash(position)
        change = {STORED: self.blocks.add, REMOVED: self.blocks.discard, SAVED: self.points.add}
        change.get(kind, self.points.discard)(key)
        return CacheEvent(self.sequence, kind, key, position)

    def hits(self, ids: list[int]) -> tuple[int, tuple[int, ...]]:
        c = chain(ids)
        reach = 0
        while (reach + 1) * BLOCK <= len(ids) and c.block_hashes[reach] in self.blocks:
            reach += 1
        last = min(reach * BLOCK + BLOCK, len(ids)) - 1
        usable = range(BLOCK, min(reach * BLOCK, len(ids) - 1) + 1, BLOCK)
        at_blocks = [p for p in usable if c.prefix_hash(p) in self.points]
        deepest = max(at_blocks, default=0)
        inside = [p for p in range(deepest + 1, last + 1) if p % BLOCK and c.prefix_hash(p) in self.points]
        return max(reach * BLOCK, *inside[-1:], 0), tuple(at_blocks + inside[-1:])


@pytest.mark.parametrize("seed", range(30))
def test_events_taken_together_are_those_taken_one_by_one(seed: int) -> None:
    """Messages short and long, with entries that come and go in one of them, and kinds of a newer release."""
    draw = random.Random(seed)
    together, alone = HitIndex(1 << 22), HitIndex(1 << 22)
    feeds = [(Feed(together), Feed(alone)) for _ in range(2)]
    names = [draw.randbytes(16) for _ in range(160)]
    for _ in range(40):
        bulk, single = draw.choice(feeds)
        kinds = draw.choice([[STORED], [STORED, REMOVED], [STORED, REMOVED, SAVED, DROPPED], [STORED, SAVED, 0, 200]])
        count = draw.choice([3, 30, 120])
        hashes = draw.sample(names, count) if draw.random() < 0.5 else draw.choices(names, k=count)
        events = [CacheEvent(bulk.sequence + 1 + i, draw.choice(kinds), h, BLOCK) for i, h in enumerate(hashes)]
        if draw.random() < 0.2:
            assert not bulk.replace(bulk.sequence + count, EventColumns.of(events))
            single.replace(bulk.sequence, [])
            single.sequence -= count
        else:
            assert not bulk.apply(EventColumns.of(events))
        for e in events:
            single.apply([e])
        assert bulk.sequence == single.sequence
        for name in draw.sample(names, 20):
            record, keys = RECORD, _Named(name)
            found, wanted = (index.holdings(record, keys, 0.0) for index in (together, alone))
            for b, s in feeds:
                assert found.reach[b.column] == wanted.reach[s.column]
                assert found.deepest[b.column] == wanted.deepest[s.column]
        assert [len(b) for b, _ in feeds] == [len(s) for _, s in feeds]


def test_a_message_larger_than_the_index_stays_within_its_bounds() -> None:
    """A small index, a worker that claims to hold thousands of entries: most are forgotten again."""
    index, draw = HitIndex(1), random.Random(0)
    worker, n, most_bytes = Feed(index), 10_000, FIRST_BUCKETS * WAYS * ROW_BYTES
    worker.apply(EventColumns(1, bytes([STORED]) * n, draw.randbytes(16 * n), pack_tokens([BLOCK] * n)))
    assert 400 < len(index) == len(worker) <= FIRST_BUCKETS * WAYS and worker.sequence == n
    assert index.used_bytes == most_bytes
    worker.close()
    assert Feed(index).column is not None


class _Named(PromptKeys):
    """A prompt of one block and a bit, whose hash is given."""

    def __init__(self, name: bytes) -> None:
        super().__init__(pack_tokens(range(BLOCK + 1)))
        self._name = name

    def block_hashes(self, record: WorkerRecord) -> list[bytes]:
        return [self._name]


@pytest.mark.parametrize("seed", range(60))
def test_block_by_block_is_as_with_arrays(seed: int) -> None:
    """Prompts with a common beginning; blocks and states in the table, gathered, removed and expected."""
    draw, index = random.Random(seed), HitIndex(1 << 22)
    columns = [index.take_column() for _ in range(draw.choice([2, 5, 70]))][-4:]
    prompts = [PromptKeys(pack_tokens([*range(20), *draw.choices(range(9), k=40)])) for _ in range(3)]
    for _ in range(80):
        keys, column = draw.choice(prompts).block_numbers(RECORD), draw.choice(columns)
        assert column is not None
        at = draw.randrange(len(keys))
        match draw.randrange(6):
            case 0:
                for key in keys[: at + 1]:
                    index.store(column, key)
            case 1:
                hashes = b"".join(draw.choice(prompts).block_hashes(RECORD)[: at + 1])
                n = len(hashes) // 16
                index.change(column, EventColumns(1, bytes([STORED]) * n, hashes, pack_tokens([BLOCK] * n)))
            case 2:
                index.store_checkpoint(column, keys[at], (at + 1) * BLOCK)
            case 3:
                draw.choice([index.remove, index.remove_checkpoint])(column, keys[at])
            case 4:
                index.expected.add(column, [*keys[:at], keys[at] ^ CHECKPOINT], draw.choice([0.5, 9.0]), 0.0)
            case 5:
                len(index)  # what has gathered goes into the table
        prompt = PromptKeys(draw.choice(prompts).packed[: 4 * draw.randrange(1, 61)])
        few, many = index._few(RECORD, prompt, 1.0), index._many(RECORD, prompt, 1.0)
        assert few is not None
        assert few.reach.tolist() == many.reach.tolist() and few.deepest.tolist() == many.deepest.tolist()
        assert [few.checkpoints(c) for c in columns] == [many.checkpoints(c) for c in columns]


def test_states_are_expected_where_workers_save_them() -> None:
    """Prompts shorter than the distance between them, as long and longer."""
    draw, at_intervals = random.Random(7), 0
    for _ in range(500):
        record = dataclasses.replace(RECORD, block_bytes=100, slot_bytes=draw.choice([1, 100, 310]))
        tokens = draw.randrange(1, 20 * BLOCK)
        blocks = draw.sample(range(1 << 60), tokens // BLOCK)
        resumed, reach = sorted(draw.randrange(tokens) for _ in range(2))
        interval = -(-INTERVAL_STATE_SHARE * record.slot_bytes // record.block_bytes) * BLOCK
        kept = checkpoint_positions(resumed, reach, tokens, BLOCK, interval)
        at_intervals += len(kept) > 2
        expected = [blocks[at // BLOCK - 1] ^ CHECKPOINT for at in kept]
        assert expected_states(record, blocks, tokens, resumed, reach) == expected
    assert at_intervals > 50
