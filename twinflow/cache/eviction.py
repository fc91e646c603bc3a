"""What goes when a pool is full: the unreferenced entry of the lowest priority (`worth.py`).

Blocks go deepest first, so that a reach never has holes; of checkpoints that are worth the same the shallowest goes first
(whoever used the deeper one does not need it).
"""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.pool import Pool
from twinflow.cache.tree import Node, PrefixTree
from twinflow.cache.worth import Policy

U = TypeVar("U", bound=int)

SWEEP_EVERY = 4  # evictions look at one entry again
COMPACT_FACTOR = 4  # rebuild the heap when it is this many times the pool

Key = tuple[float, int]  # priority, rank


class Queue(Generic[U]):
    """Candidates by (priority, rank). Entries may be stale: they are checked when they come to the top, never searched for.
    A priority that has fallen counts once the unit is offered again, or when the sweep comes by."""

    def __init__(self, pool: Pool[U], key: Callable[[U], Key], ready: Callable[[U], bool]) -> None:
        self._pool = pool
        self._key = key
        self._ready = ready
        self._heap: list[tuple[float, int, U]] = []
        self._cursor = self._peeks = 0

    def offer(self, u: U) -> None:
        """`u` may be evicted from now on, as far as is known, and its priority is this."""
        heapq.heappush(self._heap, (*self._key(u), u))
        self._compact()

    def _compact(self) -> None:
        if len(self._heap) > COMPACT_FACTOR * self._pool.total + 64:
            self._heap = [(*self._key(v), v) for v in self.units() if self._ready(v)]
            heapq.heapify(self._heap)

    def peek(self) -> tuple[float, U] | None:
        """(priority, unit) of the next one to go, or None."""
        self._sweep()
        while self._heap:
            at, rank, u = self._heap[0]
            if not self._ready(u):
                heapq.heappop(self._heap)
                continue
            now = self._key(u)
            if now == (at, rank):
                return at, u
            heapq.heapreplace(self._heap, (*now, u))
            if self._heap[0][2] == u:
                return now[0], u
        return None

    def pop(self) -> U | None:
        """The next one to go, or None."""
        found = self.peek()
        if found is None:
            return None
        heapq.heappop(self._heap)
        return found[1]

    def units(self) -> set[U]:
        return {u for _, _, u in self._heap}

    def _sweep(self) -> None:
        """Looks again at one entry now and then: what a class of entries is worth can change while none of them is touched."""
        self._peeks += 1
        if self._peeks % SWEEP_EVERY or not self._heap:
            return
        self._cursor = (self._cursor + 1) % len(self._heap)
        at, rank, u = self._heap[self._cursor]
        if self._ready(u) and (now := self._key(u)) < (at, rank):
            heapq.heappush(self._heap, (*now, u))
            self._compact()


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
            self._drop(self._tree.block_nodes[block])
        return block is not None

    def evict_slot(self) -> bool:
        slot = self.slot_queue.pop()
        if slot is not None:
            self._tree.drop_state(slot)
        return slot is not None

    def evict_with_descendants(self, node: Node) -> None:
        """Drops an evictable block and what hangs below it, deepest first."""
        for each in reversed(list(self.subtree(node))):
            self._drop(each)

    def subtree(self, node: Node) -> list[Node]:
        """`node` and the nodes below it that have a block, parents before children."""
        found = [node]
        for each in found:
            found.extend(each.children[key] for key in each.kv_order)
        return found

    def _drop(self, node: Node) -> None:
        orphans = self._tree.carried(node)
        self._tree.drop_block(node)
        for slot in orphans:
            if self._slots.reclaimable[slot]:
                self.slot_queue.offer(slot)
        if node.parent is not None:
            self._offer_node(node.parent)

    def _state_dropped(self, slot: SlotId, node: Node, tail: bytes) -> None:
        """The block that carried it is worth less now."""
        self._policy.dropped(slot)
        carrier = self._tree.closest(node, tail)[0] if tail else node
        if carrier is not None:
            self._offer_node(carrier)

    def _offer_node(self, node: Node) -> None:
        """`node` may have become a leaf."""
        if node.kv is not None and self._block_ready(node.kv):
            self.block_queue.offer(node.kv)

    def _block_key(self, block: BlockId) -> Key:
        return self._policy.block(block), -self._tree.block_nodes[block].position

    def _slot_key(self, slot: SlotId) -> Key:
        node, tail = self._tree.slot_homes[slot]
        return self._policy.slot(slot), node.state_position(tail)

    def _block_ready(self, block: BlockId) -> bool:
        node = self._tree.block_nodes.get(block)
        return node is not None and bool(self._blocks.reclaimable[block]) and not node.kv_order

    def _block_changed(self, block: BlockId, reclaimable: bool) -> None:
        node = self._tree.block_nodes.get(block)
        if node is None:  # just dropped
            return
        self._tree.reclaimable_changed(node)
        self._offer_node(node)

    def _slot_changed(self, slot: SlotId, reclaimable: bool) -> None:
        if reclaimable:
            self.slot_queue.offer(slot)
