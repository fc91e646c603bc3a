"""Where states are saved: the pure plan, and what siblings, extensions and a full pool make of it."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.test_arena import LAYOUT
from tests.cache.world import World
from twinflow.contracts.checkpoints import CheckpointKind, checkpoint_positions, default_interval_tokens

BOUNDARY, JUNCTION, INTERVAL = CheckpointKind.BOUNDARY, CheckpointKind.JUNCTION, CheckpointKind.INTERVAL


@pytest.mark.parametrize(
    ("resumed", "reach", "prompt", "cuts"),
    [
        (0, 0, 1, {}),
        (0, 0, 64, {}),
        (0, 0, 65, {64: BOUNDARY}),
        (0, 0, 200, {192: BOUNDARY}),
        (192, 200, 200, {}),
        (64, 64, 200, {192: BOUNDARY}),
        (0, 130, 400, {128: JUNCTION, 384: BOUNDARY}),
        (64, 127, 400, {384: BOUNDARY}),  # the reach ends in the block behind the checkpoint
        (64, 128, 400, {128: JUNCTION, 384: BOUNDARY}),
        (0, 400, 400, {384: BOUNDARY}),  # all of the prompt is there but its states
        (0, 0, 2000, {500 // 64 * 64 + 64: INTERVAL, 1024: INTERVAL, 1536: INTERVAL, 1984: BOUNDARY}),
        (0, 1100, 2000, {512: INTERVAL, 1088: JUNCTION, 1536: INTERVAL, 1984: BOUNDARY}),
        (600, 600, 1100, {1088: BOUNDARY}),
    ],
)
def test_positions(resumed, reach, prompt, cuts):
    assert checkpoint_positions(resumed, reach, prompt, 64, 500) == cuts


@pytest.mark.parametrize(
    ("resumed", "prompt", "total", "cuts"),
    [
        (0, 100, 1000, {64: BOUNDARY, 512: INTERVAL}),
        (0, 100, 512, {64: BOUNDARY}),  # ends before
        (0, 100, 2000, {64: BOUNDARY, 512: INTERVAL, 1024: INTERVAL, 1536: INTERVAL}),
        (0, 512, 1100, {448: BOUNDARY, 1024: INTERVAL}),  # not close behind the prompt's last one
        (700, 100, 2000, {1024: INTERVAL, 1536: INTERVAL}),  # resumed inside what was generated
        (100, 100, 600, {512: INTERVAL}),  # its prompt was computed elsewhere
    ],
)
def test_positions_while_generating(resumed, prompt, total, cuts):
    assert checkpoint_positions(resumed, resumed, prompt, 64, 500, total) == cuts
    assert checkpoint_positions(resumed, resumed, prompt, 64, 0, total).keys() <= {(prompt - 1) // 64 * 64}


@given(
    resumed=st.integers(0, 900),
    reach=st.integers(0, 900),
    prompt=st.integers(1, 900),
    block=st.sampled_from([1, 4, 64]),
    interval=st.integers(0, 300),
    reply=st.integers(0, 900),
)
def test_positions_are_ascending_boundaries_that_will_be_passed(resumed, reach, prompt, block, interval, reply):
    resumed, reach = min(resumed, prompt - 1), min(reach, prompt)
    cuts = checkpoint_positions(resumed, reach, prompt, block, interval, prompt + reply)
    assert list(cuts) == sorted(cuts)
    assert all(p % block == 0 and resumed < p < prompt + reply for p in cuts)
    assert all(p < prompt or kind is INTERVAL for p, kind in cuts.items())
    last = (prompt - 1) // block * block
    assert (last in cuts) == (last > resumed)
    if interval:
        step = -(-interval // block) * block
        stops = [resumed, *cuts, prompt + reply]
        assert all(b - a <= 2 * step for a, b in itertools.pairwise(stops))
    else:
        assert all(p < prompt for p in cuts)


def test_the_default_interval_costs_a_quarter_of_the_kv():
    tokens = default_interval_tokens(LAYOUT)
    assert tokens % LAYOUT.block_tokens == 0
    kv_bytes = tokens // LAYOUT.block_tokens * LAYOUT.block_bytes
    assert 0.2 < LAYOUT.slot_bytes / kv_bytes <= 0.25


# -- in the cache


def prefill(world, tokens, interval=0):
    """As the engine does: chunks end at the plan's positions, states are kept there, the end is donated."""
    holding = world.reserve(world.chain(tokens), 0)
    cuts = checkpoint_positions(
        holding.resumed_tokens, holding.written_tokens, len(tokens), world.block_tokens, interval
    )
    for at, kind in cuts.items():
        world.feed(holding, at - holding.position)
        world.cache.checkpoint(holding, kind)
    world.feed(holding)
    world.release(holding, donate=True)
    return holding


@pytest.fixture
def world():
    world = World(blocks=64, slots=12)
    yield world
    world.settle()
    world.check()


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_the_third_sibling_resumes_where_the_first_two_parted(world, extra):
    shared = list(range(20 + extra))
    found = [prefill(world, [*shared, *([100 + i] * 30)]).resumed_tokens for i in range(4)]
    assert found == [0, 0, 20, 20]


def test_siblings_that_part_at_different_places_each_leave_a_junction(world):
    base = list(range(40))
    prefill(world, [*base, *[200] * 9])
    prefill(world, [*base[:32], *[201] * 9])
    prefill(world, [*base[:16], *[202] * 9])
    assert prefill(world, [*base[:32], *[203] * 9]).resumed_tokens == 32
    assert prefill(world, [*base[:16], *[204] * 9]).resumed_tokens == 16


def test_states_at_intervals_serve_the_second_sibling_already(world):
    prefill(world, list(range(60)), interval=16)
    assert prefill(world, [*range(40), 99, 99, 99]).resumed_tokens == 32


def test_where_slots_run_out_the_shallow_ones_of_a_path_go_first():
    world = World(blocks=64, slots=4)
    prefill(world, list(range(100)), interval=16)
    kept = world.cache.match(world.chain(range(100))).checkpoints
    assert len(kept) == 4  # of 16, 32, 48, 64, 80 and 96, and the end
    assert {96, 100} <= set(kept)
    assert min(kept) >= 48
    world.settle()
    world.check()


@pytest.mark.parametrize("slots", range(2, 12))
def test_of_the_states_at_intervals_of_a_path_the_deepest_are_kept(slots):
    """Strictly: whatever each of them would be worth by itself."""
    world = World(blocks=64, slots=slots)
    prefill(world, list(range(180)), interval=16)
    kept = world.cache.match(world.chain(range(180))).checkpoints
    assert len(kept) == slots
    assert kept == (*range(16, 180, 16), 180)[-slots:]


@pytest.mark.parametrize("seed", range(8))
def test_a_path_is_thinned_from_its_shallow_end_under_any_load(seed):
    rng, world = random.Random(seed), World(blocks=96, slots=10)
    prefill(world, list(range(120)), interval=16)
    intervals = kept = set(range(16, 113, 16)) & set(world.cache.match(world.chain(range(120))).checkpoints)
    assert len(intervals) > 3
    for i in range(40):
        at = rng.randrange(1, 100)
        prompt = [*range(at), *[200 + i] * 9] if rng.random() < 0.3 else [130 + i] * rng.randrange(1, 40)
        prefill(world, prompt, interval=16)
        kept = intervals & set(world.cache.match(world.chain(range(120))).checkpoints)
        gone = intervals - kept
        assert not kept or not gone or max(gone) < min(kept), f"{sorted(gone)} went before {sorted(kept)}"
        intervals = kept
    world.settle()
    world.check()


def test_the_third_of_three_prompts_that_share_5000_tokens_resumes_at_the_junction():
    """At 64-token blocks: two prompts share 5,000 tokens, then differ; the second one leaves a state where they part."""
    world = World(blocks=400, slots=8, block_tokens=64)
    shared = [i % 251 for i in range(5000)]
    found = []
    for i in range(4):
        written = world.cache.match(world.chain([*shared, *[300 + i] * 90])).attention_tokens
        holding = prefill(world, [*shared, *[300 + i] * 90])
        found.append((written, holding.resumed_tokens))
        world.settle()
        world.check()
    assert found == [(0, 0), (4992, 0), (4992, 4992), (4992, 4992)]


def test_a_long_reply_leaves_states_at_intervals_for_a_turn_that_keeps_only_a_part_of_it(world):
    holding = world.reserve(world.chain(range(10)), 90)
    cuts = checkpoint_positions(0, 0, 10, 4, 16, 90)
    for token in range(10, 75):
        holding.chain.append([token])
        at = next((p for p in cuts if p > holding.position), 1000)
        world.feed(holding, min(at, len(holding.chain)) - holding.position)
        if holding.position in cuts:
            world.cache.checkpoint(holding, cuts[holding.position])
    world.feed(holding)
    world.release(holding, donate=True)
    assert world.cache.match(world.chain(range(75))).checkpoints == (8, 16, 32, 48, 64, 75)
    assert world.reserve(world.chain([*range(50), 99])).resumed_tokens == 48


def test_a_checkpoint_is_never_worth_a_request(world):
    """Every slot runs: checkpoints are skipped, nothing waits and nothing fails."""
    running = [world.reserve(world.chain([i] * 5), 0) for i in range(12)]
    for holding in running:
        world.feed(holding, 4)
        assert not world.cache.checkpoint(holding, BOUNDARY)
        world.feed(holding)
