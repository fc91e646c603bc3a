"""Faults that other caches of hybrid models have had: one test for each kind, named after it."""

import pytest

from tests.cache.world import LARGE_STATE, World, make_layout
from twinflow.cache.arena import ArenaGeometry
from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec, TensorSpec
from twinflow.contracts.tags import StateTag


@pytest.fixture
def world():
    world = World(blocks=16, slots=4)
    yield world
    world.settle()
    world.check()


def usable(world, tokens):
    return world.cache.match(world.chain(tokens)).usable_tokens


def test_a_prompt_shorter_than_a_block_is_hit(world):
    """Blocks inflated to the size of a state: short prompts never hit."""
    world.serve([1, 2])
    assert usable(world, [1, 2, 3]) == 2


@pytest.mark.parametrize("state", [(2, 3), LARGE_STATE], ids=["small state", "large state"])
def test_capacity_is_what_the_pools_really_give(state):
    """Layers treated alike: capacity reported several times too large or too small."""
    world = World(blocks=9, slots=3, state=state, block_floor=4)
    limit = world.cache.max_request_tokens()
    assert limit == 9 * world.block_tokens
    holding = world.reserve(world.chain([]), limit)
    assert holding is not None and len(holding.blocks) == 9
    counts = world.cache.counts()
    used = counts["attention"].total * world.geometry.block_bytes + counts["state"].total * world.geometry.slot_bytes
    assert world.geometry.total_bytes - used < world.geometry.block_bytes


def test_smaller_kv_gives_more_blocks_whatever_a_state_weighs():
    """A state's page pinned the block's size: half the KV bytes, no capacity won."""

    def layout(dtype: str) -> CacheLayout:
        kv = tuple(TensorSpec(name, (2, 64), dtype) for name in "kv")
        state = (TensorSpec("temporal", (32, 65), "float32"),)
        return CacheLayout(
            "m",
            (
                GroupSpec("attention", GroupKind.ATTENTION, (1,), kv, 16),
                GroupSpec("state", GroupKind.STATE, (0,), state),
            ),
        )

    wide, narrow = (ArenaGeometry.split(layout(d), 4 << 20, slots=8).blocks for d in ("float32", "bfloat16"))
    assert narrow in (2 * wide, 2 * wide + 1)


def test_a_state_is_labelled_with_the_tokens_that_were_fed_not_with_drafts(world):
    """A state written over rejected draft tokens was published under the tokens before them."""
    holding = world.reserve(world.chain([1, 2, 3, 4, 5]))
    world.feed(holding)
    holding.chain.append([6, 7, 8])  # drafts: known, not fed
    world.cache.commit(holding)
    world.release(holding, donate=True)
    match = world.cache.match(world.chain([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert (match.attention_tokens, match.checkpoints) == (5, (5,))


def test_what_was_fed_and_then_rejected_is_published_by_nobody(world):
    """The same fault, one step later: the drafts were fed, so blocks and the state have them; they were not verified."""
    holding = world.reserve(world.chain([1, 2, 3, 4, 5]), 8)
    world.feed(holding)
    verified = {e.prefix_hash for e in world.cache.snapshot()[1]}
    holding.chain.append([6, 7, 8, 9, 10, 11, 12])
    world.feed(holding, commit=False)
    world.release(holding, donate=False)
    assert {e.prefix_hash for e in world.cache.snapshot()[1]} == verified == {holding.chain.prefix_hash(4)}
    match = world.cache.match(world.chain([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]))
    assert (match.attention_tokens, match.checkpoints) == (4, ())


def test_drafts_do_not_switch_the_cache_off(world):
    """Speculative decoding silently disabled prefix hits."""
    world.serve([1, 2, 3, 4, 5, 6])
    holding = world.reserve(world.chain([1, 2, 3, 4, 5, 6, 7]))
    holding.chain.append([50, 51])
    assert holding.resumed_tokens == 6
    world.feed(holding, 1)
    world.release(holding, donate=True)
    assert usable(world, [1, 2, 3, 4, 5, 6, 7, 8]) == 7


def test_what_a_step_still_writes_is_not_a_hit(world):
    """A checkpoint was hit by the very step that wrote it."""
    holding = world.reserve(world.chain(range(8)), 4)
    world.step([(holding, 8)])
    assert world.cache.match(world.chain(range(9))).attention_tokens == 0
    world.end_step()
    world.cache.commit(holding)
    assert world.checkpoint(holding)
    assert usable(world, range(9)) == 8


@pytest.mark.parametrize("fault", ["position", "hash", "layout"])
def test_a_state_of_another_position_prefix_or_block_size_is_refused(world, fault):
    """States restored from a wrong column, or with the wrong block size."""
    chain = world.chain(range(6))
    holding = world.hold_prefix(chain)
    assert world.complete(holding)
    own, other = world.layout.fingerprint(), make_layout(block_tokens=8).fingerprint()
    assert own != other
    tag = {
        "position": StateTag(chain.prefix_hash(6), 4, own),
        "hash": StateTag(chain.prefix_hash(4), 6, own),
        "layout": StateTag(chain.prefix_hash(6), 6, other),
    }[fault]
    with pytest.raises(ValueError, match="tagged"):
        world.cache.adopt(holding, tag)
    assert holding.position == 0
    world.end_io()


def test_no_slot_for_a_checkpoint_is_no_error(world):
    """ "Cannot allocate a state" killed the loop."""
    running = [world.reserve(world.chain([i, i, i, i, 9]), 0) for i in range(4)]
    for holding in running:
        world.feed(holding, 4)
        assert not world.checkpoint(holding)
        world.feed(holding)
    assert world.reserve(world.chain([8]), 0) is None


def test_nothing_leaks_between_match_and_admission(world):
    """Slots leaked when a request was aborted after its match, or when its admission failed half way."""
    world.serve([1, 2, 3, 4])
    world.settle()
    world.check()
    before = world.cache.counts()
    world.cache.match(world.chain([1, 2, 3, 4, 5]))
    claim = world.hold_prefix(world.chain([1, 2, 3, 4, 5]))
    world.release(claim, donate=False)
    world.device.fail_copies = True
    with pytest.raises(RuntimeError, match="copy failed"):
        world.cache.reserve(world.chain([1, 2, 3, 4, 5]), 20)
    assert world.cache.counts() == before


def test_neither_group_evicts_the_other_below_its_floor():
    """Checkpoints and KV shared one LRU and threw each other out, so that the groups' hits drifted apart."""
    world = World(blocks=12, slots=2, block_floor=6, state=LARGE_STATE)
    for i in range(40):
        world.serve([i % 100], extra=0)  # states of no KV to speak of
    assert world.cache.counts()["attention"].total >= 6
    for i in range(10):
        world.serve([100 + i] * 40, extra=0)  # KV with few states
    assert world.cache.counts()["state"].total >= 2
    assert usable(world, [109] * 41) == 40
    world.check()


def test_a_long_request_costs_one_slot(world):
    """A state pool sized by the longest context: concurrency 1."""
    assert world.reserve(world.chain([1]), 50) is not None
    assert world.cache.counts()["state"].held == 1
    for i in range(3):
        assert world.reserve(world.chain([2 + i]), 0) is not None


def test_a_number_means_a_unit_of_one_pool(world):
    """Eviction by number hit every pool that had that number."""
    held = world.serve([1, 2, 3, 4, 5])
    assert (held.blocks[0], held.slot) == (0, 0)
    world.cache.flush("attention")
    assert world.cache.counts()["attention"].cached == 0
    assert world.cache.match(world.chain([1, 2, 3, 4, 5, 6])).checkpoints == (5,)
