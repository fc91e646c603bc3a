"""What holds of the boundary whatever the load: floors, nothing in use is touched, nobody starves, nobody waits for it."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cache.world import LARGE_STATE, SMALL_STATE, World
from twinflow.cache.arena import ALIGN_BYTES, Arena, ArenaGeometry
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec, TensorSpec
from twinflow.contracts.hashing import TokenChain, root_hash

DEMANDS = st.lists(
    st.tuples(
        st.sampled_from(["short", "long", "lease", "finish", "finish", "cancel", "pin", "unpin", "step"]),
        st.integers(0, 40),
    ),
    min_size=10,
    max_size=80,
)
SIZES = st.sampled_from(
    [(12, 2, 4, LARGE_STATE), (20, 1, 2, LARGE_STATE), (16, 3, 1, SMALL_STATE), (9, 2, 9, LARGE_STATE)]
)


class Load:
    """Requests that share nothing, so that what each of them needs is known."""

    def __init__(self, blocks, slots, block_floor, state):
        self.world = World(blocks=blocks, slots=slots, block_floor=block_floor, state=state)
        self.pinned = []
        self.prompts = 0

    def chain(self, tokens):
        self.prompts += 1
        return self.world.chain([self.prompts] * tokens)

    def do(self, what, n):
        world = self.world
        running = [h for h in world.holdings if h.slot is not None]
        if what in ("short", "long"):
            tokens = 1 + (n % 4 if what == "short" else n)
            holding = world.reserve(self.chain(tokens), 0) if tokens <= world.cache.max_request_tokens() else None
            if holding is not None:
                world.feed(holding)
        elif what == "lease" and running:
            world.hold_prefix(running[n % len(running)].chain)
        elif what in ("finish", "cancel") and world.holdings:
            holding = world.holdings[n % len(world.holdings)]
            world.release(holding, donate=what == "finish" and holding.slot is not None)
        elif what == "pin":
            tree = world.cache._tree
            units = (list(tree.blocks())[n % 5 :: 7], sorted(tree.tails.saved)[n % 3 :: 4])
            world.cache.pin_io(*units)
            self.pinned.append(units)
        elif what == "unpin" and self.pinned:
            world.cache.unpin_io(*self.pinned.pop(n % len(self.pinned)))
        elif what == "step":
            world.settle()

    def in_use(self):
        """Units that somebody references or that I/O touches, with what the device has in them."""
        cache, device = self.world.cache, self.world.device
        blocks = {b for b in range(cache.geometry.blocks) if cache._blocks.refs[b] or b in cache._blocks.pins}
        slots = {s for s in range(cache.geometry.slots) if cache._slots.refs[s] or s in cache._slots.pins}
        return {b: list(device.kv[b]) for b in blocks}, {s: device.states[s] for s in slots}

    def end(self):
        for units in self.pinned:
            self.world.cache.unpin_io(*units)
        for holding in list(self.world.holdings):
            self.world.release(holding, donate=holding.slot is not None)
        self.world.settle()
        self.world.check()


@given(SIZES, DEMANDS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_what_is_in_use_stays_where_it_is_and_as_it_is(sizes, demands):
    load = Load(*sizes)
    for what, n in demands:
        before = load.in_use() if what in ("short", "long") else ({}, {})
        load.do(what, n)
        load.world.check()  # floors, both sides beside each other, content
        blocks, slots = load.in_use()
        assert before[0].items() <= blocks.items() and before[1].items() <= slots.items()
    load.end()


@given(SIZES, DEMANDS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_request_within_the_floors_is_admitted_wherever_the_boundary_is(sizes, demands):
    load = Load(*sizes)
    cache, geometry = load.world.cache, load.world.geometry
    for what, n in demands:
        if what in ("lease", "pin"):
            continue
        load.do(what, n)
        held = cache.counts()
        spare = geometry.block_floor - held["attention"].held
        if held["state"].held < geometry.slot_floor and spare > 0:
            tokens = 1 + n % (spare * load.world.block_tokens)
            holding = load.world.reserve(load.chain(tokens), 0)
            assert holding is not None, f"{tokens} tokens within the floors were refused at {held}"
            load.world.feed(holding)
            load.world.release(holding, donate=n % 2 == 0)
    load.end()


@given(SIZES, DEMANDS)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_nobody_starves_whoever_came_before(sizes, demands):
    """After any history either side can have the most that it can ever have."""
    load = Load(*sizes)
    for what, n in demands:
        load.do(what, n)
    load.end()
    world, geometry = load.world, load.world.geometry
    most = world.cache.max_request_tokens()
    for _ in range(2):
        whole = world.reserve(load.chain(most), 0)
        assert whole is not None and world.cache.counts()["attention"].total == geometry.blocks_beside(
            geometry.slot_floor
        )
        world.release(whole, donate=False)
        many = [world.reserve(load.chain(0), 0) for _ in range(geometry.slots)]
        assert None not in many and world.cache.counts()["state"].total == geometry.slots
        for holding in many:
            world.release(holding, donate=False)
        world.settle()
        world.check()


def test_blocks_are_handed_out_lowest_first_and_slots_highest_address_first():
    """So that the boundary rarely meets something in use. Slot 0 is the one at the end of the arena."""
    rng, world = random.Random(0), World(blocks=40, slots=2, block_floor=4, state=LARGE_STATE)
    for _ in range(200):
        blocks = [b for b in range(world.geometry.blocks) if world.cache._blocks.is_free(b)]
        slots = [s for s in range(world.geometry.slots) if world.cache._slots.is_free(s)]
        if world.holdings and rng.random() < 0.5:
            world.release(rng.choice(world.holdings), donate=False)
        elif len(blocks) >= 6 and slots:
            holding = world.reserve(world.chain([rng.randrange(200)]), rng.randrange(20))
            assert (holding.blocks, holding.slot) == (blocks[: len(holding.blocks)], slots[0])
    offsets = [world.geometry.slot_offset(s) for s in range(world.geometry.slots)]
    assert offsets == sorted(offsets, reverse=True)


ODD = CacheLayout(
    "33 KiB beside 1.1 MiB",
    (
        GroupSpec(
            "attention", GroupKind.ATTENTION, (1, 2), tuple(TensorSpec(n, (1, 264), "bfloat16") for n in "kv"), 16
        ),
        GroupSpec("state", GroupKind.STATE, (0,), (TensorSpec("temporal", (24, 12_016), "float32"),)),
    ),
)


@pytest.mark.parametrize("spare", [0, 1, 255, 33 * 1024 - 1])
def test_pages_of_33_kib_and_1_1_mib_use_the_arena_in_every_split(spare):
    """No common multiple, no padding: less than one block is lost, and 256 B where the budget is no multiple of it."""
    assert (ODD.block_bytes, ODD.slot_bytes) == (33 * 1024, 1_153_536)
    budget = 64 * (1 << 20) + spare
    geometry = ArenaGeometry.split(ODD, budget, slots=2, block_floor=40)
    assert budget - geometry.total_bytes < ALIGN_BYTES and geometry.total_bytes % ALIGN_BYTES == 0

    class NoCopies:
        def copy_slot(self, source, target): ...

        def copy_block(self, source, target): ...

    cache, running = HybridCache(ODD, geometry, NoCopies()), []
    for _ in range(geometry.slots):  # every split from one floor to the other
        holding = cache.reserve(TokenChain(root_hash("f"), 16), 0)
        assert holding is not None
        running.append(holding)
        counts = cache.counts()
        used = counts["attention"].total * ODD.block_bytes + counts["state"].total * ODD.slot_bytes
        assert geometry.total_bytes - used < ODD.block_bytes
        assert used >= 0.99 * budget
        cache.check_integrity()
    assert cache.counts()["state"].total == geometry.slots > 50


def test_views_of_odd_pages_are_aligned_and_disjoint():
    geometry = ArenaGeometry.split(ODD, 4 << 20, slots=2, block_floor=3)
    arena = Arena(ODD, geometry)
    for unit in range(2):
        arena.layers("attention", "k")[1][unit] = 1
        arena.layers("state", "temporal")[0][geometry.slot_row(unit)] = 2
        assert arena.block_bytes(unit).count_nonzero() and arena.slot_bytes(unit).count_nonzero()
        assert geometry.block_offset(unit) % ALIGN_BYTES == geometry.slot_offset(unit) % ALIGN_BYTES == 0
    before = arena.slot_bytes(1).clone()
    arena.block_bytes(geometry.blocks_beside(2) - 1).fill_(7)
    assert (arena.slot_bytes(1) == before).all()
