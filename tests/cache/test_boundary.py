"""The boundary between blocks and slots: it moves with demand, both ways, and never through what somebody uses."""

import pytest

from tests.cache.world import LARGE_STATE, World


@pytest.fixture
def world():
    """12 blocks of 128 B beside 2 slots of 340 B; at most 5 slots, then 4 blocks are left."""
    world = World(blocks=12, slots=2, block_floor=4, state=LARGE_STATE)
    yield world
    world.settle()
    world.check()


def split(world):
    counts = world.cache.counts()
    return counts["attention"].total, counts["state"].total


def run(world, tokens, extra=0):
    holding = world.reserve(world.chain(tokens), extra)
    if holding is not None:
        world.feed(holding)
    return holding


def test_slots_grow_into_memory_that_blocks_do_not_need(world):
    assert split(world) == (12, 2)
    for i in range(3):
        assert run(world, [i] * 4) is not None
    assert split(world) == (9, 3)
    world.check()


def test_blocks_get_it_back_from_checkpoints_that_nobody_uses(world):
    for i in range(4):
        world.serve([i] * 4, extra=0)
    assert split(world)[1] == 4
    assert run(world, [9] * 44) is not None
    assert split(world) == (12, 2)


def test_what_is_held_at_the_boundary_stays_and_the_request_behind_it_waits(world):
    """Slots in use do not move; the request fits once they are given back, and not before."""
    running = [run(world, [i] * 4) for i in range(4)]
    there = split(world)
    assert there[1] == 4
    assert world.reserve(world.chain([9] * 44), 0) is None
    for holding in running[:3]:
        world.release(holding, donate=False)
    assert split(world) == there
    assert world.reserve(world.chain([9] * 44), 0) is None
    world.release(running[3], donate=False)
    world.settle()
    assert world.reserve(world.chain([9] * 44), 0) is not None


@pytest.mark.parametrize("by", ["lease", "read"])
def test_blocks_at_the_boundary_that_somebody_reads_do_not_go(world, by):
    long = world.serve(range(48), extra=0)  # all 12 blocks are cached, the last one is next to the boundary
    lease = world.hold_prefix(world.chain(range(48))) if by == "lease" else None
    world.cache.pin_io(long.blocks, [])
    world.reserve(world.chain([]), 0)
    world.reserve(world.chain([]), 0)
    assert world.reserve(world.chain([]), 0) is None
    assert split(world) == (12, 2)
    world.cache.unpin_io(long.blocks, [])
    if lease is not None:
        assert world.reserve(world.chain([]), 0) is None
        world.release(lease, donate=False)
    assert world.reserve(world.chain([]), 0) is not None
    assert split(world) == (9, 3)


@pytest.mark.parametrize("slots", [2, 3, 4, 5])
def test_each_side_keeps_its_floor(world, slots):
    """However many slots are in use, a request of the blocks' floor fits; the slots' floor is there beside any block."""
    for _ in range(slots - 1):
        assert world.reserve(world.chain([]), 0) is not None
    assert world.reserve(world.chain([9] * 16), 0) is not None
    assert world.reserve(world.chain([8]), 0) is None or slots < 5
    for holding in list(world.holdings):
        world.release(holding, donate=False)
    assert world.reserve(world.chain([9] * 44), 4) is not None
    assert world.reserve(world.chain([]), 0) is not None


def test_neither_side_starves_under_a_load_that_wants_only_the_other():
    world = World(blocks=24, slots=2, block_floor=6, state=LARGE_STATE)
    for i in range(60):
        world.serve([i % 250, *range(20)], reply=[i % 9], extra=20)
        assert split(world)[0] >= 6 and split(world)[1] >= 2
        if i % 10 == 9:
            assert run(world, [200 + i % 50] * 90) is not None
            world.release(world.holdings[-1], donate=False)
            world.settle()
    world.check()


def test_a_transfer_never_meets_a_copy_from_the_other_side_of_the_boundary(world):
    """The bytes of a checkpoint whose copy is still queued become blocks: no transfer may write there before it ran."""
    holding = run(world, range(4))
    assert world.checkpoint(holding)
    second = run(world, [7] * 4)
    assert split(world)[1] == 3
    assert world.checkpoint(second)  # the fourth slot: its copy is queued, it lies next to the boundary
    assert split(world)[1] == 4
    for h in (holding, second):
        world.release(h, donate=False)
    transfer = world.hold_prefix(world.chain([9]))
    assert not world.complete(transfer, 47)
    world.settle()
    assert world.complete(transfer, 47)
    world.scribble()
    world.settle()
    world.check()
    world.end_io()


def test_bytes_that_changed_sides_keep_their_fence(world):
    """On the compute stream the bytes may be taken at once; a transfer behind it still has to wait."""
    a = run(world, range(4))
    assert world.checkpoint(a) and split(world)[1] == 2
    b = run(world, [7] * 4)
    assert world.checkpoint(b) and split(world)[1] == 4
    world.release(a, donate=False)
    world.release(b, donate=False)
    big = world.reserve(world.chain([5] * 44), 0)  # takes the bytes of slots 2 and 3, with their copies still queued
    assert big is not None and split(world) == (12, 2)
    world.release(big, donate=False)
    transfer = world.hold_prefix(world.chain([9]))
    assert not world.complete(transfer, 47)
    world.settle()
    assert world.complete(transfer, 47)
    world.end_io()


def test_a_state_that_lies_where_the_blocks_must_be_is_given_up_rather_than_never_served(world):
    for i in range(3):
        world.serve([i] * 5, extra=0)
    assert world.cache.match(world.chain([2] * 6)).usable_tokens == 5
    holding = world.reserve(world.chain([2] * 6), 42)
    assert holding is not None
    assert split(world) == (12, 2)
    world.feed(holding)


def test_a_request_that_needs_more_than_there_can_ever_be_is_refused_in_any_split(world):
    assert world.cache.max_request_tokens() == 48
    for _ in range(4):
        world.reserve(world.chain([]), 0)
    assert world.cache.max_request_tokens() == 48


def love_what_is_at_the_edge(world):
    """Four checkpoints; the one next to the boundary is in use again and again, the others never. Returns its tokens."""
    for i in range(4):
        world.serve([i] * 4, extra=0)
    world.settle()
    name = world.cache._tree.tails.saved[world.cache.counts()["state"].total - 1].name
    loved = next([i] * 4 for i in range(4) if world.chain([i] * 4).prefix_hash(4) == name)
    for _ in range(3):
        again = world.reserve(world.chain([*loved, 99]), 0)
        assert again.resumed_tokens == 4
        world.release(again, donate=False)
    return loved


def test_what_is_worth_more_takes_the_place_of_what_is_worth_less(world):
    loved = love_what_is_at_the_edge(world)
    there, copied = split(world)[1], len(world.device.copied_slots)
    big = world.reserve(world.chain([9] * 32), 0)
    assert big is not None
    assert split(world)[1] < there
    assert len(world.device.copied_slots) > copied
    assert world.cache.match(world.chain([*loved, 99])).usable_tokens == 4
    world.feed(big)


def test_a_move_that_fails_gives_everything_back(world):
    loved = love_what_is_at_the_edge(world)
    world.settle()
    world.device.fail_copies = True
    with pytest.raises(RuntimeError, match="copy failed"):
        world.cache.reserve(world.chain([9] * 32), 32)
    world.check()
    counts = world.cache.counts()
    assert counts["attention"].held == counts["state"].held == 0
    assert world.cache.match(world.chain([*loved, 99])).usable_tokens == 4
    world.device.fail_copies = False
    assert world.reserve(world.chain([9] * 44), 4) is not None
