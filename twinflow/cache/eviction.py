"""What goes when a pool is full: the unreferenced entry of the lowest priority (`worth.py`).

Blocks go deepest first, so that a reach never has holes. Of checkpoints that are worth the same the shallowest goes first
(whoever used the deeper one does not need it), and of those at intervals of one path always: if one of them is due, the
shallowest goes in its stead.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from twinflow.cache.base import BlockId, Holding, SlotId
from twinflow.cache.heap import Key, UnitHeap
from twinflow.cache.pool import Pool
from twinflow.cache.tree import Found, PrefixTree
from twinflow.cache.worth import Policy

U = TypeVar("U", bound=int)


class Queue(Generic[U]):
    """Candidates by (priority, rank). Entries may be stale: they are checked when they come to the top, never searched for.
    A priority that has fallen counts once the unit is offered again, or when the sweep comes by."""

    def __init__(self, pool: Pool[U], key: Callable[[U], Key], ready: Callable[[U], bool]) -> None:
        self._heap = UnitHeap(pool.size, pool.unit)
        self._key = key
        self._ready = ready
        self._cursor = 0

    def __contains__(self, u: U) -> bool:
        return u in self._heap

    def __len__(self) -> int:
        return len(self._heap)

    def check_order(self) -> None:
        """Raises AssertionError if the heap is none."""
        self._heap.check_order()

    def offer(self, u: U) -> None:
        """`u` may be evicted from now on, as far as is known, and its priority is this."""
        self._heap.put(u, self._key(u))

    def peek(self) -> tuple[float, U] | None:
        """(priority, unit) of the next one to go, or None."""
        self._sweep()
        while self._heap:
            u = self._heap.at(0)
            if not self._ready(u):
                self._heap.remove(u)
                continue
            now = self._key(u)
            if now != self._heap.key(u):
                self._heap.put(u, now)
            if self._heap.at(0) == u:
                return now[0], u
        return None

    def pop(self) -> U | None:
        """The next one to go, or None."""
        found = self.peek()
        if found is None:
            return None
        self._heap.remove(found[1])
        return found[1]

    def _sweep(self) -> None:
        """Looks again at one entry each time: what a class of entries is worth can change while none of them is touched."""
        if not self._heap:
            return
        self._cursor = (self._cursor + 1) % len(self._heap)
        u = self._heap.at(self._cursor)
        if self._ready(u) and (now := self._key(u)) < self._heap.key(u):
            self._heap.put(u, now)


class Evictor:
    """Drops entries of the tree, one at a time; listens to both pools to know what may go."""

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

    def evict_block(self) -> bool:
        block = self.block_queue.pop()
        if block is not None:
            self._drop(block)
        return block is not None

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
        orphans, parent = self._tree.carried(block), self._tree.links.parent(block)
        self._tree.drop_block(block)
        for slot in orphans:
            if self._slots.reclaimable[slot]:
                self.slot_queue.offer(slot)
        if parent is not None:
            self._offer_block(parent)

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
