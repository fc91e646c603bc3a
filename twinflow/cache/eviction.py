"""What goes when a pool is full: the unreferenced entry of the lowest priority (`worth.py`).

Blocks go deepest first, so that a reach never has holes. Of checkpoints that are worth the same the shallowest goes first
(whoever used the deeper one does not need it), and of those at intervals of one path always: if one of them is due, the
shallowest goes in its stead.
"""

from collections.abc import Iterator, Sequence

from twinflow.cache.base import BlockId, Holding, SlotId
from twinflow.cache.heap import Key
from twinflow.cache.pool import Pool
from twinflow.cache.queue import Queue
from twinflow.cache.tree import Found, PrefixTree
from twinflow.cache.worth import Policy


class Evictor:
    """Drops entries of the tree; listens to both pools to know what may go."""

    def __init__(self, tree: PrefixTree, blocks: Pool[BlockId], slots: Pool[SlotId], policy: Policy) -> None:
        self._tree = tree
        self._blocks = blocks
        self._slots = slots
        self._policy = policy
        self.block_queue = Queue(blocks, self._block_key, self._block_ready)
        self.slot_queue = Queue(slots, self._slot_key, lambda s: bool(slots.reclaimable[s]))
        blocks.listener = self._block_changed
        slots.listener = self._slot_changed
        tree.dropped = self._state_dropped

    def evict_blocks(self, most: int, limit: float | None = None) -> int:
        """Drops the next block to go and, up to `most` in all, those above it that are the next ones in turn. Returns how many
        that were; 0 = none can go. `limit`: each but the first goes only if it is worth no more than that."""
        block = self.block_queue.pop()
        if block is None:
            return 0
        path, orphans = [block], self._tree.carried(block)
        if not orphans:
            path += self.block_queue.pass_through(self._next_above(block, most - 1, limit))
            self._sweep(len(path) - 1, weighed=limit is not None)
        above = self._tree.links.parent(path[-1])
        self._tree.drop_path(path)
        self._dropped(orphans, above)
        return len(path)

    def _sweep(self, gone: int, *, weighed: bool) -> None:
        """As often as when each had been asked for by itself, and, if weighed, both queues for who is next."""
        self.block_queue.sweep(2 * gone if weighed else gone)
        if weighed:
            self.slot_queue.sweep(gone)

    def _next_above(self, block: BlockId, most: int, limit: float | None) -> Iterator[tuple[BlockId, Key]]:
        """What may go when the ones below have gone, with the key that it has then: nothing else hangs below, and it carries no
        checkpoint."""
        tree, queue, used, bare = self._tree, self.block_queue, self._blocks.used, self._policy.bare
        for _ in range(most):
            above = tree.links.only_parent(block)
            if above is None or not self._blocks.reclaimable[above] or tree.carried(above) or above in queue:
                return
            block, priority = above, used[above] + bare
            if limit is not None and priority > limit:
                return
            yield block, (priority, -tree.position(block))

    def evict_slot(self) -> bool:
        slot = self.slot_queue.pop()
        if slot is None:
            return False
        first = self._first_of_path(slot)
        if first != slot:
            self.slot_queue.offer(slot)
        self._tree.drop_state(first)
        return True

    def _first_of_path(self, slot: SlotId) -> SlotId:
        """Of the checkpoints at intervals on the way to such a one, the shallowest that can go."""
        first, at = slot, self._policy.before(slot) if self._policy.thinned(slot) else None
        while at is not None:
            if self._policy.thinned(at) and self._slots.reclaimable[at]:
                first = at
            at = self._policy.before(at)
        return first

    def evict_with_descendants(self, block: BlockId) -> None:
        """Drops an evictable block and what hangs below it, deepest first."""
        for each in reversed(self._subtree(block)):
            self._drop(each)

    def withdraw(self, found: Found, holding: Holding) -> None:
        """Drops what `holding` has computed, with what hangs below it, then what it was computed from as far as nothing else
        hangs there; never what another holding has. `found`: its chain as it is in the tree now."""
        own_slot, own_blocks = holding.checkpoint_slot, set(holding.blocks)
        for position, slot in found.checkpoints.items():
            if position > holding.resumed_tokens:
                self._withdraw_state(slot, own_slot)
        hit, inside = divmod(holding.hit_attention_tokens, self._tree.block_tokens)
        suspects = found.full[:hit]
        if hit < len(found.full):
            suspects += self._subtree(found.full[hit])
        elif inside and found.common is not None:
            suspects.append(found.common)  # its own block began as a copy of that one
        for block in reversed(suspects):
            if self._tree.links.has_children(block) or self._blocks.refs[block] > (block in own_blocks):
                continue
            for slot in self._tree.carried(block):
                self._withdraw_state(slot, own_slot)
            self._drop(block)

    def _withdraw_state(self, slot: SlotId, own: SlotId | None) -> None:
        if self._slots.refs[slot] == (slot == own):
            self._tree.drop_state(slot)

    def _subtree(self, block: BlockId) -> list[BlockId]:
        """The block and those below it, parents before children."""
        found = [block]
        for each in found:
            found.extend(self._tree.links.children(each))
        return found

    def _drop(self, block: BlockId) -> None:
        orphans, above = self._tree.carried(block), self._tree.links.parent(block)
        self._tree.drop_block(block)
        self._dropped(orphans, above)

    def _dropped(self, orphans: Sequence[SlotId], above: BlockId | None) -> None:
        """Checkpoints that had their KV there are worth nothing now; the block above may have become a leaf."""
        for slot in orphans:
            if self._slots.reclaimable[slot]:
                self.slot_queue.offer(slot)
        if above is not None:
            self._offer_block(above)

    def _state_dropped(self, slot: SlotId, carriers: Sequence[BlockId]) -> None:
        """The blocks that carried it are worth less now."""
        self._policy.dropped(slot)
        for block in carriers:
            self._offer_block(block)

    def _offer_block(self, block: BlockId) -> None:
        """`block` may have become a leaf."""
        if self._block_ready(block):
            self.block_queue.offer(block)

    def _block_key(self, block: BlockId) -> Key:
        return self._policy.block(block), -self._tree.position(block)

    def _slot_key(self, slot: SlotId) -> Key:
        return self._policy.slot(slot), self._tree.tails.saved[slot].position

    def _block_ready(self, block: BlockId) -> bool:
        return bool(self._blocks.reclaimable[block]) and not self._tree.links.has_children(block)

    def _block_changed(self, block: BlockId, reclaimable: bool) -> None:
        if self._blocks.published[block]:  # else just dropped
            self._tree.reclaimable_changed(block)
            self._offer_block(block)

    def _slot_changed(self, slot: SlotId, reclaimable: bool) -> None:
        if reclaimable:
            self.slot_queue.offer(slot)
