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
