"""The geometry and the views; content through the kernels' views equals content by units."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.world import make_geometry, make_layout
from twinflow.cache.arena import Arena, ArenaGeometry
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec, TensorSpec
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash

LAYOUT = CacheLayout(
    "mixed",
    (
        GroupSpec(
            "attention",
            GroupKind.ATTENTION,
            (3, 7),
            (TensorSpec("k", (2, 8), "bfloat16"), TensorSpec("v", (2, 8), "bfloat16")),
            16,
        ),
        GroupSpec(
            "state",
            GroupKind.STATE,
            (0, 1, 2),
            (TensorSpec("temporal", (4, 8, 4), "float32"), TensorSpec("conv", (3, 24), "bfloat16", 1)),
        ),
    ),
)


@pytest.mark.parametrize("slots", [5, 9, 14], ids=lambda n: f"{n} slots")
def test_blocks_come_from_the_low_end_and_slots_from_the_high_end_without_overlap(slots):
    geometry = ArenaGeometry.split(LAYOUT, 64 * 1024, slots=5)
    assert geometry.slots >= 14
    ranges = [(geometry.block_offset(b), geometry.block_bytes) for b in range(geometry.blocks_beside(slots))]
    ranges += [(geometry.slot_offset(s), geometry.slot_bytes) for s in reversed(range(slots))]
    assert ranges[0][0] == 0
    assert sum(ranges[-1]) == geometry.total_bytes
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))
    assert geometry.total_bytes - sum(n for _, n in ranges) < geometry.block_bytes


def test_each_side_has_a_floor_which_is_what_the_other_can_never_have():
    geometry = ArenaGeometry.split(LAYOUT, 64 * 1024, slots=5, block_floor=3)
    assert (geometry.slot_floor, geometry.block_floor) == (5, 3)
    assert geometry.blocks == geometry.blocks_beside(5) > geometry.blocks_beside(geometry.slots) == 3
    fixed = ArenaGeometry(geometry.total_bytes, geometry.block_bytes, geometry.slot_bytes, geometry.blocks, 5)
    assert (fixed.slot_floor, fixed.block_floor) == (fixed.slots, fixed.blocks)


@given(st.integers(256, 1 << 20), st.integers(256, 1 << 22), st.integers(1, 400), st.integers(0, 40), st.data())
def test_any_two_sizes_use_99_percent_of_the_arena_in_any_split(block, slot, blocks, slots, data):
    """Sizes that are not multiples of each other need no padding: what is lost is less than one block."""
    total = (blocks + 100) * block + slots * slot
    geometry = ArenaGeometry(total, block, slot, total // block, total // slot)
    there = data.draw(st.integers(0, geometry.slots))
    used = there * slot + geometry.blocks_beside(there) * block
    assert total - used < block
    assert used >= 0.99 * total


def test_what_does_not_fit_is_refused_with_the_bytes():
    with pytest.raises(ValueError, match=rf"need {100 * LAYOUT.slot_bytes + LAYOUT.block_bytes} B"):
        ArenaGeometry.split(LAYOUT, 1024, slots=100)


@pytest.mark.parametrize("tensor", ["k", "v", "temporal", "conv"])
def test_views_and_units_are_the_same_bytes(tensor):
    geometry = ArenaGeometry.split(LAYOUT, 64 * 1024 + 512, slots=3)
    arena = Arena(LAYOUT, geometry)
    attention = tensor in ("k", "v")
    views = arena.layers("attention" if attention else "state", tensor)
    for unit in (0, 2):
        row = unit if attention else geometry.slot_row(unit)
        for layer, view in enumerate(views):
            view[row] = 1 + layer
        content = arena.block_bytes(unit) if attention else arena.slot_bytes(unit)
        assert content.count_nonzero() > 0
        content.zero_()
        assert all(not view[row].any() for view in views)
    assert not arena.storage.any()


def test_the_arena_is_the_copier():
    layout = make_layout()
    geometry = make_geometry(layout, blocks=8, slots=3)
    arena = Arena(layout, geometry)
    cache = HybridCache(layout, geometry, arena)
    chain = TokenChain(root_hash("f"), 4, pack_tokens(range(4)))
    holding = cache.reserve(chain, 4)
    arena.slot_bytes(holding.slot).fill_(7)
    cache.advance(holding, 4)
    cache.commit(holding)
    cache.release(holding, donate=True)
    chain.append([9])
    again = cache.reserve(chain, 8)
    assert again.resumed_tokens == 4
    assert again.slot != holding.slot
    assert torch.equal(arena.slot_bytes(again.slot), arena.slot_bytes(holding.slot))
    cache.check_integrity()
