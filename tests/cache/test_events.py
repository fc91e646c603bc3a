import functools
import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from tests.cache.world import LARGE_STATE, World
from twinflow.cache.events import EventLog
from twinflow.contracts.events import CacheEvent, EventKind


def test_numbers_start_at_one_and_go_on_across_drains():
    log = EventLog()
    assert (log.sequence, log.drain()) == (0, [])
    log.emit(EventKind.BLOCK_STORED, b"a", 4)
    log.emit(EventKind.BLOCK_REMOVED, b"a", 4)
    assert log.drain() == [
        CacheEvent(1, EventKind.BLOCK_STORED, b"a", 4),
        CacheEvent(2, EventKind.BLOCK_REMOVED, b"a", 4),
    ]
    log.emit(EventKind.CHECKPOINT_STORED, b"b", 5)
    assert [e.sequence for e in log.drain()] == [3]
    assert log.sequence == 3


def test_a_snapshot_and_what_follows_it_is_the_whole_view():
    """A router that resyncs in the middle: entries of the snapshot, then events with higher numbers. Also while the boundary
    moves entries about, which nobody outside needs to know."""
    world = World(blocks=12, slots=2, block_floor=4, state=LARGE_STATE)
    for i in range(6):
        world.serve([i % 4, *range(10)], reply=[i], extra=2)
    last, stored = world.cache.snapshot()
    view = {(e.kind.name.lower().split("_")[0], e.prefix_hash, e.position) for e in stored}
    world.events += world.cache.drain_events()
    seen = len(world.events)
    assert world.events[-1].sequence == last
    for i in range(6):
        world.serve([40 + i] * 17, extra=2)
    world.events += world.cache.drain_events()
    for e in world.events[seen:]:
        what, change = e.kind.name.lower().split("_")
        (view.add if change == "stored" else view.remove)((what, e.prefix_hash, e.position))
    assert view == world.snapshot() == world.replayed()


class Subscriber:
    """Whoever follows a cache over a line that loses, repeats and delays messages: what the contract allows to be known."""

    def __init__(self) -> None:
        self.sequence = 0
        self.view: set[tuple[str, bytes, int]] = set()
        self.lost = False  # something is missing: a snapshot is due

    def events(self, batch: Sequence[CacheEvent]) -> None:
        for e in batch:
            if e.sequence > self.sequence + 1:
                self.lost = True
            elif e.sequence == self.sequence + 1:
                self.sequence = e.sequence
                what, change = e.kind.name.lower().split("_")
                (self.view.add if change == "stored" else self.view.remove)((what, e.prefix_hash, e.position))

    def snapshot(self, last: int, entries: Sequence[CacheEvent]) -> None:
        if last >= self.sequence:
            self.sequence, self.lost = last, False
            self.view = {(e.kind.name.lower().split("_")[0], e.prefix_hash, e.position) for e in entries}


def contents(world: World) -> set[tuple[str, bytes, int]]:
    """Of the pools, not of what was said about them."""
    tree = world.cache._tree
    full = {("block", tree.name(b), tree.position(b)) for b in tree.blocks() if not tree.is_partial(b)}
    return full | {("checkpoint", s.name, s.position) for s in tree.tails.saved.values()}


@pytest.mark.parametrize("seed", range(12), ids=lambda s: f"seed{s}")
@pytest.mark.parametrize("loses", [0.0, 0.2, 0.7], ids=lambda p: f"loses {p:.0%}")
def test_who_missed_events_resynchronises_and_ends_with_exactly_what_is_there(seed, loses):
    rng, world, follower = (
        random.Random(seed),
        World(blocks=20, slots=2, block_floor=4, state=LARGE_STATE),
        Subscriber(),
    )
    line: deque[Callable[[], None]] = deque()  # messages on their way, in order
    asked, snapshots, backlog = False, 0, []
    for _ in range(150):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        world.serve(tokens, reply=[rng.randrange(3) for _ in range(rng.randrange(4))], extra=6)
        if rng.random() < 0.05:
            world.cache.flush(rng.choice([None, "attention", "state"]))
        batch = world.cache.drain_events()
        backlog += batch
        if rng.random() >= loses:
            line.append(functools.partial(follower.events, batch))
        if rng.random() < 0.1:
            line.append(functools.partial(follower.events, backlog[-rng.randrange(1, 40) :]))  # repeated, or late
        while line and rng.random() < 0.7:
            line.popleft()()
        if follower.lost and not asked:
            asked = True
        if asked and rng.random() < 0.5:  # the answer joins the end of the line, behind events that it includes already
            line.append(functools.partial(follower.snapshot, *world.cache.snapshot()))
            asked, snapshots = False, snapshots + 1
    while line:
        line.popleft()()
    assert (snapshots > 0) == (loses > 0)
    follower.events(world.cache.drain_events())
    if follower.sequence != world.cache.snapshot()[0]:
        assert loses > 0
        follower.snapshot(*world.cache.snapshot())
    assert follower.view == contents(world)
    world.events = backlog
    assert world.replayed() == contents(world)
    assert len({e.kind for e in backlog}) == 4


def test_a_snapshot_changes_nothing_and_says_each_thing_once():
    world = World(blocks=12, slots=4)
    world.serve([1, 2, 3, 4, 5, 6, 7, 8, 9], extra=0)
    world.cache.drain_events()
    first, second = world.cache.snapshot(), world.cache.snapshot()
    assert first == second and world.cache.drain_events() == []
    assert (
        len({(e.kind, e.prefix_hash) for e in first[1]}) == len(first[1]) == 3
    )  # two blocks and a state; no partial block
    assert {e.sequence for e in first[1]} == {first[0]}
