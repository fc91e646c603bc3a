"""The walk finds what is wrong: one fault of each kind, put in by hand."""

import pytest

from tests.cache.world import World


def leak_a_reference(cache):
    cache._blocks.refs[0] += 1


def lose_a_free_unit(cache):
    cache._blocks._free.pop()


def miscount(cache):
    cache._slots._count[0] += 1


def miscount_pins(cache):
    cache._slots._pinned += 1


def leave_a_hole(cache):
    node = next(n for n in cache._tree.nodes() if n.position == 4)
    cache._tree.block_nodes.pop(node.kv)
    cache._blocks.unpublish(node.kv)
    node.kv = None


def label_with_another_hash(cache):
    next(n for n in cache._tree.nodes() if n.position == 8).prefix_hash = b"x" * 16


def forget_a_checkpoint(cache):
    cache._tree.slot_homes.clear()


def keep_an_empty_node(cache):
    node = next(n for n in cache._tree.nodes() if n.position == 8)
    cache._tree._add(node, b"\0" * 16)


def miscount_evictable(cache):
    cache._tree.evictable_blocks += 1


def forget_to_queue_a_leaf(cache):
    cache._evictor.block_queue._heap.clear()


def forget_to_queue_a_slot(cache):
    cache._evictor.slot_queue._heap.clear()


def run_ahead_of_the_kv(cache):
    live = next(iter(cache._live.values()))
    live.holding.position = live.holding.written_tokens + 1


def publish_a_running_slot(cache):
    live = next(iter(cache._live.values()))
    cache._tree.store_state(cache._tree.root(live.holding.chain), b"\1" * 4, live.holding.slot)


FAULTS = [
    leak_a_reference, lose_a_free_unit, miscount, miscount_pins, leave_a_hole, label_with_another_hash,
    forget_a_checkpoint, keep_an_empty_node, miscount_evictable, forget_to_queue_a_leaf, forget_to_queue_a_slot,
    run_ahead_of_the_kv, publish_a_running_slot,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_found(fault):
    world = World(blocks=8, slots=3)
    world.serve([1, 2, 3, 4, 5, 6, 7, 8, 9], extra=0)
    running = world.reserve(world.chain([50, 51, 52]), 0)
    world.feed(running)
    world.cache.check_integrity()
    fault(world.cache)
    with pytest.raises(AssertionError):
        world.cache.check_integrity()
