import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.world import make_layout
from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.events import EventLog
from twinflow.cache.eviction import Evictor
from twinflow.cache.pool import Pool, StepClock
from twinflow.cache.tails import common_prefix_tokens
from twinflow.cache.tree import PrefixTree
from twinflow.cache.worth import Recency
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash

BT = make_layout().block_tokens


def chain(*tokens, tenant=""):
    return TokenChain(root_hash("f", tenant), BT, pack_tokens(tokens))


class Bed:
    def __init__(self):
        steps = StepClock()
        self.blocks = Pool("attention", 64, BlockId, steps)
        self.slots = Pool("state", 64, SlotId, steps)
        self.tree = PrefixTree(BT, self.blocks, self.slots, EventLog())
        policy = Recency(make_layout(), self.tree, self.blocks, self.slots)
        Evictor(self.tree, self.blocks, self.slots, policy)  # tells the tree what has become evictable

    def store(self, c, partial=False):
        """Publishes all full blocks of a chain (and the rest as a partial one), unreferenced. Returns the path."""
        for index in range(self.tree.reach(c), len(c) // BT):
            (block,) = self.blocks.take(1)
            self.tree.store_blocks(c, index, [block])
            self.blocks.unref(block, 1)
        rest = len(c) % BT
        found = self.tree.walk(c)
        if partial and rest and found.common_tokens < rest:
            (block,) = self.blocks.take(1)
            self.tree.store_tail(c, len(c), block)
            self.blocks.unref(block, 1)
            return [*found.full, block]
        return found.full

    def save(self, c, position):
        (slot,) = self.slots.take(1)
        self.tree.store_state(c, position, slot)
        self.slots.unref(slot, 1)
        return slot


@pytest.fixture
def bed():
    return Bed()


def reach(found):
    return len(found.full) * BT + found.common_tokens


def test_nothing_is_found_in_an_empty_tree(bed):
    found = bed.tree.walk(chain(1, 2, 3, 4, 5))
    assert (found.full, found.common, found.checkpoints) == ([], None, {})


def test_tenants_do_not_see_each_other(bed):
    bed.store(chain(1, 2, 3, 4, 5, 6), partial=True)
    bed.save(chain(1, 2, 3, 4, 5, 6), 6)
    assert reach(bed.tree.walk(chain(1, 2, 3, 4, 5, 6))) == 6
    found = bed.tree.walk(chain(1, 2, 3, 4, 5, 6, tenant="other"))
    assert (reach(found), found.checkpoints) == (0, {})


@pytest.mark.parametrize("offset", range(BT + 1))
def test_a_partial_block_is_used_up_to_where_the_prompt_diverges(bed, offset):
    bed.store(chain(1, 2, 3, 4, 5, 6, 7), partial=True)
    tail = [5, 6, 7][:offset] + [99] * 6
    assert reach(bed.tree.walk(chain(1, 2, 3, 4, *tail))) == 4 + min(offset, 3)


@pytest.mark.parametrize("offset", range(BT + 1))
@pytest.mark.parametrize("first", ["state", "block"])
def test_a_full_block_is_used_up_to_the_deepest_state_before_the_prompt_diverges_or_ends(bed, offset, first):
    """Without a state inside, computing starts at the block's boundary anyway."""
    c = chain(1, 2, 3, 4, 5, 6, 7, 8)
    if first == "state":
        bed.save(c, 6)
    bed.store(c)
    if first == "block":
        bed.save(c, 6)
    expected = 4 + (4 if offset == 4 else 2 if offset >= 2 else 0)
    diverges = bed.tree.walk(chain(1, 2, 3, 4, *[5, 6, 7, 8][:offset], 99, 99, 99, 99))
    ends = bed.tree.walk(chain(1, 2, 3, 4, *[5, 6, 7, 8][:offset]))
    assert (reach(diverges), reach(ends)) == (expected, expected)
    assert [list(f.checkpoints) for f in (diverges, ends)] == [[6] if offset >= 2 else []] * 2


def test_a_state_is_carried_as_long_as_any_block_has_its_tokens(bed):
    """Two replies to one prompt that ends inside a block: the state at its end outlives either of them."""
    one, two = chain(1, 2, 3, 4, 5, 6, 7, 8), chain(1, 2, 3, 4, 5, 6, 70, 80)
    slot = bed.save(one, 6)
    assert not bed.tree.carries(slot)
    blocks = [bed.store(one)[-1], bed.store(two)[-1], bed.store(chain(1, 2, 3, 4, 5, 6, 9), partial=True)[-1]]
    rewritten = chain(1, 2, 3, 4, 5, 6, 0, 0)
    for left in range(3, 0, -1):
        assert bed.tree.carriers(slot) == blocks[-left:]
        assert [list(bed.tree.carried(b)) for b in blocks] == [[]] * (3 - left) + [[slot]] * left
        assert reach(bed.tree.walk(rewritten)) == 6
        bed.tree.drop_block(blocks[-left])
    assert not bed.tree.carries(slot)
    assert reach(bed.tree.walk(rewritten)) == 4


def test_a_dropped_state_is_carried_by_nobody(bed):
    c = chain(1, 2, 3, 4, 5, 6)
    block = bed.store(c, partial=True)[-1]
    slots = [bed.save(c, p) for p in (5, 6)]
    bed.tree.drop_state(slots[0])
    assert list(bed.tree.carried(block)) == [slots[1]]
    bed.tree.drop_state(slots[1])
    assert list(bed.tree.carried(block)) == []


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=BT - 1), max_size=20),
    st.lists(st.integers(0, 2), max_size=9),
)
def test_the_closest_partial_block_is_the_closest_of_all(siblings, prompt):
    bed = Bed()
    for s in siblings:
        bed.store(chain(*s), partial=True)
    best = max((common_prefix_tokens(pack_tokens(s), pack_tokens(prompt)) for s in siblings), default=0)
    assert reach(bed.tree.walk(chain(*prompt[: BT + 4]))) == best


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=9), st.lists(st.integers(0, 2**32 - 1), max_size=9), st.integers(0, 9)
)
def test_common_prefix_is_in_whole_tokens(a, b, shared):
    b = a[:shared] + b
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix_tokens(pack_tokens(a), pack_tokens(b)) == n


def test_checkpoints_are_found_at_any_position_and_beyond_the_reach(bed):
    c = chain(*range(1, 12))
    bed.store(chain(*range(1, 5)))
    slots = {p: bed.save(c, p) for p in (2, 4, 6, 8, 11)}
    found = bed.tree.walk(c)
    assert (reach(found), found.checkpoints) == (4, slots)
    assert list(found.checkpoints) == sorted(slots)
    assert list(bed.tree.walk(chain(1, 2, 3, 4, 5, 99)).checkpoints) == [2, 4]


def test_many_tails_at_one_boundary_are_looked_up_by_length(bed):
    rng = random.Random(0)
    prompts = {tuple(rng.randrange(9) for _ in range(rng.randrange(1, BT))) for _ in range(50)}
    for p in prompts:
        bed.save(chain(*p), len(p))
    for p in prompts:
        expected = sorted(len(q) for q in prompts if p[: len(q)] == q)
        assert list(bed.tree.walk(chain(*p)).checkpoints) == expected


def test_a_reach_ends_at_the_first_missing_block_and_checkpoints_stay_with_their_tokens(bed):
    c = chain(*range(8))
    path = bed.store(c)
    slot = bed.save(c, 8)
    bed.tree.drop_block(path[-1])
    found = bed.tree.walk(c)
    assert (reach(found), found.checkpoints) == (4, {8: slot})
    bed.store(c)
    assert reach(bed.tree.walk(c)) == 8


def test_what_is_dropped_leaves_nothing_behind(bed):
    c = chain(*range(10))
    path = bed.store(c, partial=True)
    slots = [bed.save(c, p) for p in (9, 8)]
    for block in reversed(path):
        bed.tree.drop_block(block)
    for slot in slots:
        bed.tree.drop_state(slot)
    tails = bed.tree.tails
    assert not any((len(bed.tree), tails.states, tails.saved, tails.partial, tails._partials, tails._carried))
    assert (bed.blocks.free, bed.slots.free) == (64, 64)


def test_only_what_has_nothing_unevictable_below_it_counts_as_evictable(bed):
    path = bed.store(chain(*range(12)))
    assert bed.tree.evictable_blocks == 3
    bed.blocks.ref(path[2], 2)
    assert bed.tree.evictable_blocks == 0
    bed.blocks.unref(path[2], 3)
    bed.blocks.pin(path[1])
    assert bed.tree.evictable_blocks == 1
    bed.blocks.unpin(path[1])
    assert bed.tree.evictable_blocks == 3


def test_a_block_that_moves_takes_everything_with_it(bed):
    """Name, parent, children, the states inside, and what it says about itself."""
    c = chain(*range(10))
    path = bed.store(c, partial=True)
    slots = {p: bed.save(c, p) for p in (6, 10)}
    before = bed.tree.walk(c)
    for index, source in enumerate(path):
        (target,) = bed.blocks.take(1)
        bed.blocks.ref(source, 2)
        bed.tree.rehome_block(source, target)
        for unit in (source, target):
            bed.blocks.unref(unit, 2)
        path[index] = target
        assert bed.blocks.is_free(source)
    found = bed.tree.walk(c)
    assert [*found.full, found.common] == path and found.common_tokens == before.common_tokens == 2
    assert found.checkpoints == before.checkpoints == slots
    assert [bed.tree.links.parent(b) for b in path] == [None, *path[:-1]]
    assert [bed.tree.position(b) for b in path] == [4, 8, 10]
    assert bed.tree.carriers(slots[6]) == [path[1]] and bed.tree.carriers(slots[10]) == [path[2]]
    assert bed.tree.evictable_blocks == 3
