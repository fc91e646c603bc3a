"""What a failed request leaves: nothing that it computed, nothing that hangs below it, and all that others rely on."""

import pytest

from tests.cache.world import World

SHARED = [1, 2, 3, 4, 5, 6, 7, 8]  # two blocks


@pytest.fixture
def world():
    world = World(blocks=24, slots=8)
    yield world
    world.settle()
    world.check()
    assert world.replayed() == world.snapshot()


def reach(world, tokens):
    match = world.cache.match(world.chain(tokens))
    return match.attention_tokens, match.checkpoints


def fail(world, holding):
    world.cache.withdraw(holding)
    world.check()
    world.release(holding, donate=False)


def test_its_blocks_and_states_are_no_hit_for_anybody(world):
    holding = world.reserve(world.chain(range(14)))
    world.feed(holding, 8)
    assert world.checkpoint(holding)
    world.feed(holding)
    assert reach(world, range(14)) == (12, (8,))
    fail(world, holding)
    assert reach(world, range(14)) == (0, ())
    assert world.cache.counts()["attention"].free == 24 and world.cache.counts()["state"].free == 8


def test_what_was_built_upon_it_goes_with_it(world):
    holding = world.reserve(world.chain(range(8)))
    world.feed(holding)
    world.serve([*range(8), 50, 51, 52, 53, 54])  # resumes on it, and ends
    assert reach(world, [*range(8), 50, 51, 52, 53, 54]) == (13, (13,))
    fail(world, holding)
    assert reach(world, [*range(8), 50, 51, 52, 53, 54]) == (0, ())
    world.serve([*range(8), 50, 51, 52, 53, 54, 55])  # computed anew, KV does not bring the old state back
    assert reach(world, [*range(8), 50, 51, 52, 53, 54, 55]) == (14, (14,))


def test_a_prefix_that_others_share_stays(world):
    world.serve([*SHARED, 20, 21, 22, 23, 24])
    first = world.reserve(world.chain([*SHARED, 30, 31, 32, 33, 34]))
    world.feed(first, 8 - first.position)
    assert world.checkpoint(first)
    world.feed(first)
    world.release(first, donate=True)
    holding = world.reserve(world.chain([*SHARED, 40, 41, 42, 43, 44]))
    assert holding.resumed_tokens == 8
    world.feed(holding)
    fail(world, holding)
    assert reach(world, [*SHARED, 40, 41, 42, 43, 44]) == (8, (8,))
    assert reach(world, [*SHARED, 20, 21, 22, 23, 24, 9]) == (13, (8, 13))
    assert reach(world, [*SHARED, 30, 31, 32, 33, 34, 9]) == (13, (8, 13))


def test_a_prefix_that_nobody_else_has_is_computed_anew(world):
    """A cancelled request may have left what it never saw to be broken: who resumes on it fails once, not for ever."""
    first = world.reserve(world.chain(SHARED))
    world.feed(first)
    assert world.checkpoint(first)
    world.release(first, donate=False)
    holding = world.reserve(world.chain([*SHARED, 40, 41]))
    assert holding.resumed_tokens == 8
    world.feed(holding)
    fail(world, holding)
    assert reach(world, [*SHARED, 40, 41]) == (0, ())


def test_so_is_a_partial_block_that_it_began_with(world):
    world.serve([*SHARED, 40, 41, 42], extra=0)
    holding = world.reserve(world.chain([*SHARED, 40, 41, 50, 51]))
    assert (holding.resumed_tokens, holding.written_tokens) == (0, 10)
    fail(world, holding)
    assert reach(world, [*SHARED, 40, 41, 50]) == (0, ())


def test_what_another_holds_stays_until_that_one_fails_too(world):
    holding = world.reserve(world.chain(SHARED))
    world.feed(holding)
    other = world.reserve(world.chain([*SHARED, 50]))
    assert other.blocks[:2] == holding.blocks[:2]
    fail(world, holding)
    assert reach(world, [*SHARED, 50])[0] == 8
    world.feed(other)
    fail(world, other)
    assert reach(world, [*SHARED, 50]) == (0, ())


def test_a_failed_request_behind_a_step_in_flight_publishes_nothing_more(world):
    holding = world.reserve(world.chain(range(12)), 4)
    world.feed(holding, 8)
    world.step([(holding, 4)])
    world.cache.withdraw(holding)
    world.end_step()
    world.release(holding, donate=False)
    assert reach(world, range(12)) == (0, ())


def test_a_released_holding_has_nothing_to_withdraw(world):
    holding = world.serve(SHARED)
    with pytest.raises(ValueError, match="released"):
        world.cache.withdraw(holding)
    assert reach(world, [*SHARED, 9]) == (8, (8,))
