import pytest

from twinflow.cache.base import BlockId, PoolCounts
from twinflow.cache.pool import Pool, StepClock, UnitState


@pytest.fixture
def steps():
    return StepClock()


@pytest.fixture
def pool(steps):
    return Pool("blocks", 4, BlockId, steps)


def end(pool, steps, step):
    steps.done = step
    pool.end_step()


def test_lowest_units_first_also_after_they_came_back(pool):
    assert pool.take(3) == [0, 1, 2]
    pool.unref(BlockId(1), 1)
    assert pool.take(2) == [1, 3]


def test_a_unit_is_in_one_state_and_counts_follow(pool):
    (u,) = pool.take(1)
    assert pool.counts() == PoolCounts(4, 3, 0, 1, 0, 0)
    pool.publish(u)
    pool.unref(u, 1)
    assert pool.counts() == PoolCounts(4, 3, 1, 0, 0, 0)
    pool.unpublish(u)
    assert pool.counts() == PoolCounts(4, 4, 0, 0, 0, 0)


def test_released_behind_a_launched_step_is_held_until_it_is_done(pool, steps):
    (u,) = pool.take(1)
    steps.launched = 2
    pool.unref(u, 1)
    assert pool.state[u] == UnitState.HELD
    end(pool, steps, 1)
    assert pool.state[u] == UnitState.HELD
    end(pool, steps, 2)
    assert pool.state[u] == UnitState.FREE


def test_a_later_release_outlasts_an_earlier_one(pool, steps):
    (u,) = pool.take(1)
    pool.publish(u)
    steps.launched = 1
    pool.unref(u, 1)
    steps.launched = 2
    pool.ref(u, 2)
    pool.unref(u, 3)
    end(pool, steps, 1)
    assert pool.state[u] == UnitState.HELD
    end(pool, steps, 2)
    assert pool.state[u] == UnitState.CACHED


def test_released_while_io_may_write_is_doomed_until_the_last_unpin(pool):
    (u,) = pool.take(1)
    pool.pin(u)
    pool.pin(u)
    pool.unref(u, 1)
    assert pool.counts() == PoolCounts(4, 3, 0, 0, 1, 1)
    pool.unpin(u)
    assert pool.state[u] == UnitState.DOOMED
    pool.unpin(u)
    assert pool.counts() == PoolCounts(4, 4, 0, 0, 0, 0)


def test_doomed_behind_a_step_waits_for_both(pool, steps):
    (u,) = pool.take(1)
    pool.pin(u)
    steps.launched = 1
    pool.unref(u, 1)
    pool.unpin(u)
    assert pool.state[u] == UnitState.HELD
    end(pool, steps, 1)
    assert pool.state[u] == UnitState.FREE


def test_a_published_source_of_io_stays_cached_but_may_not_go(pool):
    (u,) = pool.take(1)
    pool.publish(u)
    pool.pin(u)
    pool.unref(u, 1)
    assert (pool.state[u], pool.reclaimable[u]) == (UnitState.CACHED, False)
    pool.unpin(u)
    assert pool.reclaimable[u]


@pytest.mark.parametrize(
    ("references", "pinned", "unfinished", "exclusive"),
    [(1, False, False, True), (2, False, False, False), (1, True, False, False), (1, False, True, False)],
    ids=["alone", "shared", "pinned by I/O", "touched by an unfinished step"],
)
def test_exclusive(pool, steps, references, pinned, unfinished, exclusive):
    (u,) = pool.take(1)
    pool.publish(u)
    steps.launched = int(unfinished)
    pool.unref(u, 1)
    for _ in range(references):
        pool.ref(u, 2)
    if pinned:
        pool.pin(u)
    assert pool.exclusive(u) is exclusive


def test_fenced_memory_is_for_the_stream_alone(pool, steps):
    units = pool.take(4)
    pool.fence(units[0])
    for u in units:
        pool.unref(u, 1)
    assert (pool.available(off_stream=False), pool.available(off_stream=True)) == (4, 3)
    assert pool.take(2, off_stream=True) == [1, 2]
    assert pool.take(1) == [0]
    pool.unref(units[0], 2)
    steps.launched = 1
    end(pool, steps, 1)
    assert pool.available(off_stream=True) == 2


def test_what_is_discarded_is_free_and_the_lowest_is_found_again(pool):
    told = []
    units = pool.take(4)
    pool.publish_held(units)
    assert pool.counts() == PoolCounts(4, 0, 0, 4, 0, 0)
    for u in units[1:]:
        pool.unref(u, 1)
    pool.listener = lambda u, reclaimable: told.append(u)
    pool.discard([units[3], units[1]])
    assert (pool.counts(), pool.reclaimable_count, told) == (PoolCounts(4, 2, 1, 1, 0, 0), 1, [])
    assert [pool.expected_state(u) for u in units] == list(pool.state)
    assert pool.take(2) == [1, 3]
    with pytest.raises(AssertionError):
        pool.discard([units[0]])  # held
    with pytest.raises(AssertionError):
        pool.publish_held([units[0]])  # once more


@pytest.mark.parametrize("unit", [0, 99, -1], ids=["free", "too high", "negative"])
def test_io_on_memory_that_nobody_has_is_refused(pool, unit):
    with pytest.raises(ValueError, match="blocks"):
        pool.pin(BlockId(unit))
    with pytest.raises(ValueError, match="not pinned"):
        pool.unpin(BlockId(unit))


def test_dropping_a_reference_that_is_not_there_is_refused(pool):
    with pytest.raises(ValueError, match="no reference"):
        pool.unref(BlockId(0), 1)
