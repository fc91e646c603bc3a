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
    view = {(e.kind.value.split("_")[0], e.prefix_hash, e.position) for e in stored}
    world.events += world.cache.drain_events()
    seen = len(world.events)
    assert world.events[-1].sequence == last
    for i in range(6):
        world.serve([40 + i] * 17, extra=2)
    world.events += world.cache.drain_events()
    for e in world.events[seen:]:
        what, change = e.kind.value.split("_")
        (view.add if change == "stored" else view.remove)((what, e.prefix_hash, e.position))
    assert view == world.snapshot() == world.replayed()
