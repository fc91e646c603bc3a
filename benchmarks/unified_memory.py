"""Ideal memory for comparison: the boundary of a `HybridCache` also passes through what running requests hold.

Memory of a running request that is in the boundary's way goes elsewhere, as if a copy cost nothing and no kernel or transfer
knew its address. What the replay gains by it is the most that relocating live memory could give. It reaches into the
cache's insides, because nothing that serves may do this.
"""

from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.hybrid import HybridCache


def unify(cache: HybridCache) -> None:
    """Of `cache`, from now on. Only for replays: nothing is copied, nothing is pinned by I/O."""
    blocks, slots, tree, room, mover = cache._blocks, cache._slots, cache._tree, cache._room, cache._mover
    move_block, move_slot = mover.move_block, mover.move_slot

    def holders(block: BlockId) -> list[list[BlockId]]:
        return [live.holding.blocks for live in cache._live.values() if block in live.holding.blocks]

    def any_block(source: BlockId) -> None:
        if not blocks.refs[source]:
            return move_block(source)
        (target,), used = blocks.take(1), blocks.used[source]
        if blocks.published[source]:
            tree.rehome_block(source, target)
        for k, held in enumerate(holders(source)):
            held[held.index(source)] = target
            if k:
                blocks.ref(target, used)
            blocks.unref(source, used, retire=False)
        blocks.used[target] = used

    def any_slot(source: SlotId) -> None:
        if not slots.refs[source]:
            return move_slot(source)
        (target,), used = slots.take(1), slots.used[source]
        for live in cache._live.values():
            if live.holding.slot == source:
                live.holding.slot = target
        slots.unref(source, used, retire=False)

    def block_ready(block: BlockId, off_stream: bool) -> bool:
        """Idle, or only held by running requests (a block that is just being copied from has a reference more)."""
        return not blocks.refs[block] or blocks.refs[block] == len(holders(block))

    def slot_ready(slot: SlotId, off_stream: bool) -> bool:
        mine = any(slot == live.holding.slot for live in cache._live.values())
        return not slots.refs[slot] or (mine and not slots.published[slot])

    mover.move_block, mover.move_slot = any_block, any_slot  # type: ignore[method-assign]
    room._block_ready, room._slot_ready = block_ready, slot_ready  # type: ignore[method-assign]
    room._must_move = lambda pool, unit: not pool.is_free(unit)  # type: ignore[method-assign]
