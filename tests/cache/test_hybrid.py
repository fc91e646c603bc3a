"""The verbs of `HybridCache`, one behaviour each. Content is checked by `World` along the way."""

import pytest

from tests.cache.world import World
from twinflow.contracts.hits import usable_tokens


@pytest.fixture
def world():
    world = World(blocks=16, slots=4)
    yield world
    world.settle()
    world.check()
    assert world.replayed() == world.snapshot()


def counts(world, group="attention"):
    c = world.cache.counts()[group]
    return {"free": c.free, "cached": c.cached, "held": c.held, "doomed": c.doomed}


# -- resuming


def test_the_next_turn_resumes_at_the_end_of_the_reply_without_a_copy(world):
    first = world.serve([1, 2, 3, 4, 5], reply=[6, 7])  # ends inside a block
    second = world.reserve(world.chain([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]))
    assert (second.resumed_tokens, second.written_tokens) == (7, 7)
    assert (second.slot, second.blocks[:2]) == (first.slot, first.blocks[:2])
    assert (world.device.copied_slots, world.device.copied_blocks) == ([], [])
    world.feed(second)


def test_a_checkpoint_at_a_boundary_is_copied_so_that_siblings_find_it(world):
    world.serve([1, 2, 3, 4])
    for tail in (5, 6):
        sibling = world.reserve(world.chain([1, 2, 3, 4, tail]))
        assert sibling.resumed_tokens == 4
    assert len(world.device.copied_slots) == 2
    assert len({h.slot for h in world.holdings}) == 2


def test_the_only_slot_is_taken_over_even_at_a_boundary():
    world = World(blocks=8, slots=1)
    world.serve([1, 2, 3, 4], extra=0)
    holding = world.reserve(world.chain([1, 2, 3, 4, 5]))
    assert (holding.resumed_tokens, world.device.copied_slots) == (4, [])
    assert world.reserve(world.chain([9])) is None
    world.check()


def test_a_pinned_checkpoint_is_copied(world):
    first = world.serve([1, 2, 3, 4, 5])
    world.cache.pin_io([], [first.slot])
    second = world.reserve(world.chain([1, 2, 3, 4, 5, 6]))
    assert second.resumed_tokens == 5
    assert world.device.copied_slots == [(first.slot, second.slot)]
    world.cache.unpin_io([], [first.slot])


def test_a_checkpoint_of_an_unfinished_step_is_copied(world):
    first = world.reserve(world.chain([1, 2, 3, 4, 5]))
    world.feed(first)
    other = world.reserve(world.chain([9]))
    world.step([(other, 1)])
    world.release(first, donate=True)
    second = world.reserve(world.chain([1, 2, 3, 4, 5, 6]))
    assert second.resumed_tokens == 5
    assert len(world.device.copied_slots) == len(world.device.copied_blocks) == 1


def test_the_last_token_always_runs(world):
    world.serve([1, 2, 3, 4, 5, 6, 7, 8])
    holding = world.reserve(world.chain([1, 2, 3, 4, 5, 6, 7, 8]))
    assert (holding.written_tokens, holding.resumed_tokens) == (8, 0)
    assert world.cache.match(holding.chain).usable_tokens == 0
    world.feed(holding)


def test_kv_beyond_the_resumed_position_is_shared_and_not_written_again(world):
    holding = world.reserve(world.chain(range(12)))
    world.feed(holding, 4)
    assert world.checkpoint(holding)
    world.feed(holding)
    world.release(holding, donate=False)
    again = world.reserve(world.chain([*range(12), 50]))
    assert (again.resumed_tokens, again.written_tokens) == (4, 12)
    assert again.blocks[:3] == holding.blocks[:3]
    world.feed(again)


def test_per_group_hits_are_reported_as_they_are(world):
    holding = world.reserve(world.chain(range(10)))
    world.feed(holding, 4)
    world.checkpoint(holding)
    world.feed(holding)
    world.release(holding, donate=False)
    match = world.cache.match(world.chain([*range(8), 99, 98]))
    assert (match.attention_tokens, match.checkpoints, match.usable_tokens) == (8, (4,), 4)
    assert [(h.group, h.tokens) for h in match.hits] == [("attention", 8), ("state", 4)]
    assert usable_tokens(match.hits, 10) == 4


# -- partial blocks


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_partial_block_that_diverges_is_copied_and_stays(world, offset):
    world.serve([1, 2, 3, 4, 5, 6, 7])
    tail = [5, 6, 7][:offset]
    holding = world.reserve(world.chain([1, 2, 3, 4, *tail, 99]))
    assert holding.written_tokens == 4 + offset
    assert len(world.device.copied_blocks) == (offset < 3)
    world.feed(holding)
    world.release(holding, donate=True)
    match = world.cache.match(world.chain([1, 2, 3, 4, 5, 6, 7, 8]))
    assert match.attention_tokens == (7 if offset < 3 else 4)  # copied, or extended in place with its state taken over


def test_a_partial_hit_is_given_up_when_its_block_is_the_room_that_is_needed():
    world = World(blocks=2, slots=1)
    world.serve([1, 2, 3, 4, 5, 6], extra=0)
    holding = world.reserve(world.chain([1, 2, 3, 4, 5, 9]), 2)
    assert holding.written_tokens == 4
    world.feed(holding)
    world.check()


def test_a_tail_that_the_tree_already_covers_is_not_kept_twice(world):
    world.serve([1, 2, 3, 4, 5, 6, 7])
    two = [world.reserve(world.chain([1, 2, 3, 4, 5, 6])) for _ in range(2)]
    for h in two:
        world.feed(h)
        world.release(h, donate=True)
    assert counts(world)["cached"] == 2


# -- publishing


def test_only_full_blocks_below_the_cursor_are_published(world):
    holding = world.reserve(world.chain(range(10)))
    world.feed(holding, 7)
    assert (holding.published_blocks, world.cache.match(holding.chain).attention_tokens) == (1, 4)
    world.feed(holding, 3)
    assert (holding.published_blocks, world.cache.match(holding.chain).attention_tokens) == (2, 8)


def test_a_private_duplicate_is_freed_at_the_end(world):
    two = [world.reserve(world.chain(range(8))) for _ in range(2)]
    for h in two:
        world.feed(h)
    assert two[0].blocks[0] != two[1].blocks[0]
    for h in two:
        world.release(h, donate=True)
    assert (counts(world)["cached"], counts(world, "state")["cached"]) == (2, 1)


def test_a_private_duplicate_is_published_when_the_tree_has_lost_its_own(world):
    two = [world.reserve(world.chain(range(8)), 4) for _ in range(2)]
    for h in two:
        world.feed(h)
    world.release(two[0], donate=False)
    assert world.cache.flush() == 2
    world.generate(two[1], [50] * 4)
    world.check()
    assert world.cache.match(world.chain([*range(8), 50, 50, 50, 50])).attention_tokens == 12
    assert counts(world) == {"free": 13, "cached": 0, "held": 3, "doomed": 0}


def test_published_blocks_are_reused_while_their_owner_still_runs(world):
    holding = world.reserve(world.chain(range(9)))
    world.feed(holding)
    lease = world.hold_prefix(world.chain(range(9)))
    assert lease.blocks == holding.blocks[:2]
    world.release(holding, donate=False)
    assert counts(world)["held"] == 2


def test_cancelled_behind_the_attention_reach_donates_the_state_at_the_cursor(world):
    holding = world.reserve(world.chain(range(15)))
    world.feed(holding, 4)
    world.checkpoint(holding)
    world.feed(holding)
    world.release(holding, donate=False)
    again = world.reserve(world.chain([*range(15), 77]))
    assert (again.resumed_tokens, again.written_tokens) == (4, 12)
    world.feed(again, 2)
    world.release(again, donate=True)
    match = world.cache.match(world.chain([*range(15), 77]))
    assert (match.attention_tokens, match.checkpoints) == (12, (4, 6))
    world.feed(world.reserve(world.chain([*range(15), 77])))


def test_a_checkpoint_is_stored_once_and_only_where_there_is_room():
    world = World(blocks=8, slots=2)
    a, b = world.reserve(world.chain(range(4)), 0), world.reserve(world.chain(range(8)), 0)
    world.feed(a)
    assert not world.checkpoint(a)  # both slots run
    world.release(b, donate=False)
    unfed = world.reserve(world.chain([9]), 0)
    assert not world.checkpoint(unfed)
    world.release(unfed, donate=False)
    assert world.checkpoint(a)
    assert not world.checkpoint(a)  # there already
    assert world.cache.match(world.chain(range(5))).usable_tokens == 4


def test_a_failed_copy_gives_everything_back(world):
    world.serve([1, 2, 3, 4])
    world.serve([1, 2, 3, 4, 5, 6, 7])
    world.settle()
    world.check()
    before = world.cache.counts(), world.snapshot()
    world.device.fail_copies = True
    with pytest.raises(RuntimeError, match="copy failed"):
        world.cache.reserve(world.chain([1, 2, 3, 4, 5, 9]), 12)
    assert (world.cache.counts(), world.snapshot()) == before


# -- events


def test_events_name_boundaries_and_checkpoints_in_order(world):
    world.serve([1, 2, 3, 4, 5, 6])
    world.cache.flush()
    chain = world.chain([1, 2, 3, 4, 5, 6])
    events = world.cache.drain_events()
    world.events += events
    assert [(e.sequence, e.kind.name.lower(), e.prefix_hash, e.position) for e in events] == [
        (1, "block_stored", chain.prefix_hash(4), 4),
        (2, "checkpoint_stored", chain.prefix_hash(6), 6),
        (3, "block_removed", chain.prefix_hash(4), 4),
        (4, "checkpoint_removed", chain.prefix_hash(6), 6),
    ]
    assert world.cache.drain_events() == []
