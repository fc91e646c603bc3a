"""What an entry is worth: recompute time saved per byte, aged by use; and that the cache lets the least of it go."""

import itertools
import math

import pytest

from tests.cache.world import World
from twinflow.cache.base import SlotId
from twinflow.cache.worth import BARE_BLOCK, PRIOR_TRIES, Chances, Worth
from twinflow.contracts.checkpoints import CheckpointKind

BOUNDARY, INTERVAL, END = CheckpointKind.BOUNDARY, CheckpointKind.INTERVAL, CheckpointKind.END


def kept(world, tokens):
    return world.cache.match(world.chain(tokens)).checkpoints


def save(world, tokens, at=None, kind=BOUNDARY):
    """A request that leaves one state, at the end of its prompt or at `at`, and no end."""
    holding = world.reserve(world.chain(tokens), 0)
    world.feed(holding, (at or len(tokens)) - holding.position)
    assert world.cache.checkpoint(holding, kind)
    world.feed(holding)
    world.release(holding, donate=False)
    world.settle()


def slot_of(world, tokens) -> SlotId:
    name = world.chain(tokens).prefix_hash(len(tokens))
    return next(s for s, saved in world.cache._tree.tails.saved.items() if saved.name == name)


def test_of_two_states_the_one_that_saves_more_computing_stays():
    """Though it was used less recently."""
    world = World(blocks=64, slots=3)
    world.cache._policy.horizon = 1000.0  # age hardly counts
    long, short = list(range(80)), [90] * 4
    save(world, long)
    save(world, short)
    world.reserve(world.chain([99] * 5), 0)  # takes the third slot, then a copy needs one
    last = world.reserve(world.chain([98] * 5), 0)
    assert last is not None
    assert (kept(world, [*long, 1]), kept(world, [*short, 1])) == ((80,), ())


def test_age_outweighs_worth_in_the_end():
    world = World(blocks=64, slots=3)
    save(world, list(range(80)))
    world.cache._policy.horizon = 1.0
    for i in range(40):  # others use the cache meanwhile
        world.serve([100 + i % 2] * 5, extra=0)
    save(world, [90] * 4)
    assert kept(world, range(81)) == ()
    assert kept(world, [90] * 5) == (4,)


def test_worth_is_the_chance_times_the_share_of_the_bytes_that_save_computing():
    world = World(blocks=64, slots=4)
    policy, layout = world.cache._policy, world.layout
    assert isinstance(policy, Worth)
    save(world, list(range(40)))
    slot, tokens_of_a_slot = slot_of(world, range(40)), layout.slot_bytes * layout.block_tokens / layout.block_bytes
    chance = policy._chances.log_of((BOUNDARY, 0))
    expected = world.cache._slots.used[slot] + policy.horizon * (chance + math.log(40 / (40 + tokens_of_a_slot)))
    assert policy.slot(slot) == pytest.approx(expected)


def test_when_a_state_goes_its_gain_falls_to_the_ones_behind_it():
    world = World(blocks=64, slots=6)
    holding = world.reserve(world.chain(range(60)), 0)
    for at in (20, 40, 60):
        world.feed(holding, at - holding.position)
        assert world.cache.checkpoint(holding, BOUNDARY)
    world.release(holding, donate=False)
    policy = world.cache._policy
    slots = [slot_of(world, range(at)) for at in (20, 40, 60)]
    assert [policy._gain[s] for s in slots] == [20, 20, 20]
    world.cache._tree.drop_state(slots[1])
    assert [policy._gain[s] for s in (slots[0], slots[2])] == [20, 40]
    world.cache._tree.drop_state(slots[0])
    assert policy._gain[slots[2]] == 60
    world.check()


def test_a_block_is_worth_as_much_as_the_state_that_it_carries_and_without_one_a_tenth_of_a_new_state():
    world = World(blocks=64, slots=4)
    save(world, list(range(8)), at=4)
    chain, tree, policy = world.chain(range(8)), world.cache._tree, world.cache._policy
    carrier, bare = tree.names.find(chain.block_hashes[0]), tree.names.find(chain.block_hashes[1])
    assert policy.block(carrier) == max(policy.slot(slot_of(world, range(4))), policy.block(bare))
    used = world.cache._blocks.used[bare]
    assert policy.block(bare) == pytest.approx(
        used + policy.horizon * (policy._chances.log_of_new + math.log(BARE_BLOCK))
    )
    tree.drop_state(slot_of(world, range(4)))
    assert policy.block(carrier) < used + policy.horizon * policy._chances.log_of_new


def test_a_state_without_its_kv_goes_before_anything_else():
    world = World(blocks=16, slots=5)
    save(world, [1] * 8)
    save(world, [2] * 8)
    world.cache.flush("attention")
    save(world, [3] * 8)
    assert world.cache._policy.slot(slot_of(world, [1] * 8)) == -math.inf
    assert world.cache._evictor.slot_queue.peek()[0] == -math.inf
    assert world.cache._policy.slot(slot_of(world, [3] * 8)) > -math.inf


@pytest.mark.parametrize("resumed", [True, False], ids=["a kind that pays", "one that does not"])
def test_what_a_kind_is_worth_is_learnt_when_one_of_it_is_resumed_from_or_goes(resumed):
    chances = Chances()
    before = chances.log_of((INTERVAL, 0))
    for _ in range(50):
        if resumed:
            assert chances.hit((INTERVAL, 0)) == (INTERVAL, 1)
        else:
            chances.missed((INTERVAL, 0))
        chances.missed((END, 0))
        chances.hit((BOUNDARY, 0))
    after = math.exp(chances.log_of((INTERVAL, 0)))
    assert (after > math.exp(before)) == resumed
    assert abs(after - resumed) < PRIOR_TRIES / 50


def test_a_kind_that_nobody_has_tried_is_thought_to_be_like_the_others():
    chances = Chances()
    for hit in itertools.islice(itertools.cycle([True, False, False, False]), 200):
        chances.hit((BOUNDARY, 0)) if hit else chances.missed((BOUNDARY, 0))
    assert math.exp(chances.log_of((CheckpointKind.JUNCTION, 0))) == pytest.approx(0.25, abs=0.02)


def test_a_state_resumed_from_more_often_never_counts_less():
    """Else a class whose first ones were unlucky is evicted at once, and has no chance to show otherwise."""
    chances = Chances()
    for _ in range(50):
        chances.hit((BOUNDARY, 0))
        chances.missed((BOUNDARY, 0))
        chances.missed((BOUNDARY, 2))
    assert math.exp(chances.log_of((BOUNDARY, 2))) == pytest.approx(0.5, abs=0.01)
    for _ in range(100):
        chances.hit((BOUNDARY, 0))  # what is known of the others follows
    assert math.exp(chances.log_of((BOUNDARY, 2))) == pytest.approx(0.75, abs=0.01)
    for _ in range(400):
        chances.hit((BOUNDARY, 2))  # its own share is the greater one now
    assert chances.log_of((BOUNDARY, 0)) < chances.log_of((BOUNDARY, 2)) == chances.log_of((BOUNDARY, 3))


def test_older_experience_fades():
    """A kind that used to pay and no longer does is given up."""
    chances = Chances()
    for _ in range(2000):
        chances.hit((END, 0))
    for _ in range(2000):
        chances.missed((END, 0))
    assert math.exp(chances.log_of((END, 0))) < 0.15
