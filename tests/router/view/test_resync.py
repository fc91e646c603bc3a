"""A real cache and a router's feed of it, over a line that loses batches: in the end both know the same."""

import random

import pytest

from services.router.view.feed import Feed
from services.router.view.index import HitIndex
from services.router.view.prompt import PromptKeys
from tests.cache.world import LARGE_STATE, World
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.workers import Role, WorkerRecord

BLOCK = 4
RECORD = WorkerRecord("w", "i", Role.DECODE, ("a:1",), "m", "f", 4096, 2048, BLOCK)


@pytest.mark.parametrize("seed", range(6), ids=lambda s: f"seed{s}")
@pytest.mark.parametrize("loses", [0.0, 0.3], ids=lambda p: f"loses {p:.0%}")
def test_the_index_holds_exactly_what_the_cache_holds(seed, loses):
    rng, world = random.Random(seed), World(blocks=24, slots=2, block_floor=6, state=LARGE_STATE)
    index = HitIndex(1 << 20)
    feed, prompts, asks = Feed(index), [], 0
    for _ in range(120):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        prompts.append(tokens)
        world.serve(tokens, extra=4)
        batch = world.cache.drain_events()
        if rng.random() < loses:
            continue
        if feed.apply(batch):  # a gap has opened; what follows overtakes the answer
            asks += 1
            snapshot = world.cache.snapshot()
            world.serve([rng.randrange(3) for _ in range(9)], extra=4)
            late = world.cache.drain_events()
            order = [lambda s=snapshot: feed.replace(*s), lambda b=late: feed.apply(b)]
            for deliver in order if rng.random() < 0.5 else reversed(order):
                deliver()
    last, _ = world.cache.snapshot()
    if feed.sequence < last:  # the end was lost; the next event shows it
        feed.replace(*world.cache.snapshot())
    assert (feed.has_gap, feed.sequence) == (False, last)
    assert (asks > 0) == (loses > 0)
    _, contents = world.cache.snapshot()
    assert len(feed) == len(contents) > 0
    for tokens in [*prompts, *([*p, 9, 9, 9, 9, 9] for p in prompts)]:
        found = index.holdings(RECORD, PromptKeys(pack_tokens(tokens)), 0.0)
        blocks = world.cache.match(world.chain(tokens)).attention_tokens // BLOCK
        at = tuple(p for p in found.checkpoints(feed.column) if p % BLOCK == 0)
        known = world.cache.match(world.chain(tokens)).checkpoints
        assert int(found.reach[feed.column]) // BLOCK == blocks
        assert at == tuple(p for p in known if p % BLOCK == 0 and p <= min(blocks * BLOCK, len(tokens) - 1))
