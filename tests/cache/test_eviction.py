"""What goes when pools are full."""

from tests.cache.world import World


def prompts(n, length=4):
    return [[100 + i] * length for i in range(n)]


def reach(world, tokens):
    return world.cache.match(world.chain(tokens)).attention_tokens


def test_the_least_recently_used_chain_goes_first():
    world = World(blocks=6, slots=6)
    a, b, c = prompts(3, length=8)
    for p in (a, b, c):
        world.serve(p, extra=0)
    world.serve(a, extra=0)  # used again
    world.serve(prompts(4, length=8)[3], extra=0)
    assert [reach(world, p) for p in (a, b, c)] == [8, 0, 8]


def test_blocks_go_deepest_first_so_a_reach_has_no_holes():
    world = World(blocks=6, slots=6)
    long = list(range(24))
    world.serve(long, extra=0)
    for taken in range(1, 6):
        fresh = world.reserve(world.chain([50 + taken] * 4 * taken), 0)
        assert reach(world, long) == 24 - 4 * taken
        world.cache.release(fresh, donate=False)
        world.holdings.remove(fresh)
        world.check()


def test_a_shared_prefix_outlives_its_branches():
    world = World(blocks=6, slots=6)
    shared = [1, 2, 3, 4]
    for tail in ([5] * 4, [6] * 4, [7] * 4):
        world.serve(shared + tail, extra=0)
    world.reserve(world.chain([9] * 20), 0)
    assert reach(world, shared) == 4
    assert [reach(world, shared + [t] * 4) for t in (5, 6, 7)] == [4, 4, 4]


def test_what_is_referenced_is_never_evicted():
    world = World(blocks=4, slots=4)
    world.serve([1] * 8, extra=0)
    lease = world.hold_prefix(world.chain([1] * 8))
    assert world.reserve(world.chain([2] * 12), 0) is None
    assert world.reserve(world.chain([2] * 8), 0) is not None
    assert reach(world, [1] * 8) == 8
    world.cache.release(lease, donate=False)


def test_pools_have_budgets_of_their_own():
    world = World(blocks=32, slots=2)
    for p in prompts(6):
        world.serve(p, extra=0)
    counts = world.cache.counts()
    assert (counts["attention"].cached, counts["state"].cached) == (6, 2)
    assert [world.cache.match(world.chain(p)).checkpoints for p in prompts(6)] == [()] * 4 + [(4,)] * 2


def test_of_checkpoints_used_together_the_shallowest_goes_first():
    world = World(blocks=16, slots=3)
    holding = world.reserve(world.chain(range(12)), 0)
    for _ in range(2):
        world.feed(holding, 4)
        assert world.checkpoint(holding)
    world.release(holding, donate=False)
    second = world.reserve(world.chain(range(12)), 0)  # touches 4 and 8, restores 8 into the third slot
    assert second.resumed_tokens == 8
    assert world.reserve(world.chain([9]), 0) is not None
    assert world.cache.match(world.chain(range(12))).checkpoints == (8,)


def test_a_chain_below_a_private_duplicate_keeps_its_ancestors():
    world = World(blocks=8, slots=4)
    first, second = (world.reserve(world.chain(range(8)), 4) for _ in range(2))
    world.feed(first)
    world.release(first, donate=False)
    world.feed(second)  # its two blocks are private: the tree has them
    world.generate(second, [50] * 4)  # published below the tree's blocks, which nobody references
    world.check()
    assert world.reserve(world.chain([9] * 16), 0) is None  # 3 free, and nothing may leave a hole
    assert world.cache.flush() == 0
    assert world.reserve(world.chain([9] * 12), 0) is not None
    assert reach(world, [*range(8), 50, 50, 50, 50]) == 12


def test_queues_do_not_grow_with_use():
    world = World(blocks=4, slots=2)
    for i in range(400):
        world.serve([i % 3] * 5, extra=0)
    assert len(world.cache._evictor.block_queue) <= 4
    assert len(world.cache._evictor.slot_queue) <= 2
