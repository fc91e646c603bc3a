"""The walk finds what is wrong: one fault of each kind, put in by hand."""

import pytest

from tests.cache.world import World


def block_at(cache, position):
    return next(b for b in cache._tree.blocks() if cache._tree.position(b) == position)


def leak_a_reference(cache):
    cache._blocks.refs[0] += 1


def lose_a_free_unit(cache):
    cache._blocks.lowest = cache._blocks.size


def miscount(cache):
    cache._slots._count[0] += 1


def miscount_pins(cache):
    cache._slots.pins[0] = 0


def leave_a_hole(cache):
    block = block_at(cache, 4)
    cache._tree.names.remove(block)
    cache._blocks.unpublish(block)


def label_with_another_hash(cache):
    block = block_at(cache, 8)
    cache._tree.names._names[16 * block : 16 * block + 16] = b"x" * 16


def forget_a_name(cache):
    cache._tree.names.remove(block_at(cache, 4))


def forget_a_checkpoint(cache):
    cache._tree.tails.saved.clear()


def forget_who_carries_a_checkpoint(cache):
    saved = next(iter(cache._tree.tails.saved.values()))
    saved.carriers.clear()


def take_a_carrier_for_bare(cache):
    cache._tree._laden[block_at(cache, 8)] = False


def list_a_boundary_without_states(cache):
    cache._tree.tails.states[b"x" * 16] = {}


def lose_a_child(cache):
    cache._tree.links.detach(block_at(cache, 8))


def miscount_evictable(cache):
    cache._tree.evictable_blocks += 1


def miscount_what_blocks(cache):
    cache._tree.blocked[block_at(cache, 4)] += 1


def forget_to_queue_a_leaf(cache):
    cache._evictor.block_queue.pop()


def forget_to_queue_a_slot(cache):
    cache._evictor.slot_queue.pop()


def run_ahead_of_the_kv(cache):
    live = next(iter(cache._live.values()))
    live.holding.position = live.holding.written_tokens + 1


def publish_a_running_slot(cache):
    live = next(iter(cache._live.values()))
    cache._tree.store_state(live.holding.chain, 1, live.holding.slot)


FAULTS = [
    leak_a_reference, lose_a_free_unit, miscount, miscount_pins, leave_a_hole, label_with_another_hash, forget_a_name,
    forget_a_checkpoint, forget_who_carries_a_checkpoint, take_a_carrier_for_bare, list_a_boundary_without_states,
    lose_a_child, miscount_evictable, miscount_what_blocks, forget_to_queue_a_leaf, forget_to_queue_a_slot, run_ahead_of_the_kv,
    publish_a_running_slot,
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
