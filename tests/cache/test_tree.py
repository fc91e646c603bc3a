import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.world import make_layout
from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.events import EventLog
from twinflow.cache.eviction import Evictor
from twinflow.cache.pool import Pool, StepClock
from twinflow.cache.tree import PrefixTree, common_prefix_tokens
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
        """Publishes all full blocks of a chain (and the rest as a partial one), unreferenced."""
        node = self.tree.root(c)
        for at in range(0, len(c) if partial else len(c) - BT + 1, BT):
            tokens = c.packed(at, min(at + BT, len(c)))
            if tokens not in node.children or node.children[tokens].kv is None:
                (block,) = self.blocks.take(1)
                self.tree.store_block(node, tokens, block)
                self.blocks.unref(block, 1)
            node = node.children[tokens]
        return node

    def save(self, c, position):
        (slot,) = self.slots.take(1)
        self.tree.store_state(self.tree.boundary(c, position // BT), c.packed(position // BT * BT, position), slot)
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
    bed.store(chain(1, 2, 3, 4))
    assert reach(bed.tree.walk(chain(1, 2, 3, 4))) == 4
    assert reach(bed.tree.walk(chain(1, 2, 3, 4, tenant="other"))) == 0


@pytest.mark.parametrize("offset", range(BT + 1))
def test_a_partial_block_is_used_up_to_where_the_prompt_diverges(bed, offset):
    bed.store(chain(1, 2, 3, 4, 5, 6, 7), partial=True)
    tail = [5, 6, 7][:offset] + [99] * 6
    assert reach(bed.tree.walk(chain(1, 2, 3, 4, *tail))) == 4 + min(offset, 3)


@pytest.mark.parametrize("offset", range(BT))
def test_a_full_block_is_used_up_to_where_the_prompt_diverges_or_ends(bed, offset):
    bed.store(chain(1, 2, 3, 4))
    assert reach(bed.tree.walk(chain(*[1, 2, 3, 4][:offset], 99, 99, 99, 99))) == offset
    assert reach(bed.tree.walk(chain(*[1, 2, 3, 4][:offset]))) == offset


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=BT), max_size=20), st.lists(st.integers(0, 2), max_size=9)
)
def test_the_closest_child_is_the_closest_of_all(siblings, prompt):
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
    node = bed.store(c)
    slot = bed.save(c, 8)
    bed.tree.drop_block(node)
    found = bed.tree.walk(c)
    assert (reach(found), found.checkpoints) == (4, {8: slot})
    bed.store(c)
    assert reach(bed.tree.walk(c)) == 8


def test_nodes_that_keep_nothing_are_gone(bed):
    c = chain(*range(10))
    bed.store(c, partial=True)
    slot = bed.save(c, 9)
    bed.tree.drop_state(slot)
    for position in (10, 8, 4):
        bed.tree.drop_block(next(n for n in bed.tree.nodes() if n.position == position))
    assert not bed.tree.roots
    assert bed.blocks.free == 64
    assert bed.slots.free == 64


def test_only_what_has_nothing_unevictable_below_it_counts_as_evictable(bed):
    node = bed.store(chain(*range(12)))
    assert bed.tree.evictable_blocks == 3
    bed.blocks.ref(node.kv, 2)
    assert bed.tree.evictable_blocks == 0
    bed.blocks.unref(node.kv, 3)
    bed.blocks.pin(node.parent.kv)
    assert bed.tree.evictable_blocks == 1
    bed.blocks.unpin(node.parent.kv)
    assert bed.tree.evictable_blocks == 3
