"""What goes when a pool is full: the least recently used unreferenced entry of that pool alone.

Blocks and slots have budgets of their own: neither evicts the other. Blocks go deepest first, so that a reach never has
holes; of checkpoints used at the same moment the shallowest goes first (whoever used the deeper one does not need it).
"""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.pool import Pool
from twinflow.cache.tree import Node, PrefixTree

U = TypeVar("U", bound=int)

COMPACT_FACTOR = 4  # rebuild the heap when it is this many times the pool


class LruQueue(Generic[U]):
    """Candidates by (last use, rank). Entries may be stale: they are checked when popped, never searched for."""

    def __init__(self, pool: Pool[U], rank: Callable[[U], int], ready: Callable[[U], bool]) -> None:
        self._pool = pool
        self._rank = rank
        self._ready = ready
        self._heap: list[tuple[int, int, U]] = []

    def offer(self, u: U) -> None:
        """`u` may be evicted from now on, as far as is known."""
        heapq.heappush(self._heap, (self._pool.used[u], self._rank(u), u))
        if len(self._heap) > COMPACT_FACTOR * self._pool.total + 64:
            self._heap = [(self._pool.used[v], self._rank(v), v) for v in self.units() if self._ready(v)]
            heapq.heapify(self._heap)

    def pop(self) -> U | None:
        """The next one to go, or None."""
        while self._heap:
            used, rank, u = heapq.heappop(self._heap)
            if not self._ready(u):
                continue
            if (used, rank) == (self._pool.used[u], self._rank(u)):
                return u
            heapq.heappush(self._heap, (self._pool.used[u], self._rank(u), u))  # used or moved since it was offered
        return None

    def units(self) -> set[U]:
        return {u for _, _, u in self._heap}


class Evictor:
    """Makes room in a pool on demand; listens to both pools to know what may go."""

    def __init__(self, tree: PrefixTree, blocks: Pool[BlockId], slots: Pool[SlotId]) -> None:
        self._tree = tree
        self._blocks = blocks
        self._slots = slots
        self.block_queue = LruQueue(blocks, lambda b: -tree.block_nodes[b].position, self._block_ready)
        self.slot_queue = LruQueue(slots, self._slot_position, lambda s: slots.reclaimable[s])
        blocks.listener = self._block_changed
        slots.listener = self._slot_changed

    def available_blocks(self, *, off_stream: bool = False) -> int:
        """Free blocks and those that eviction would free."""
        fenced = self._blocks.fenced_reclaimable() if off_stream else 0
        return self._blocks.available(off_stream=off_stream) + self._tree.evictable_blocks - fenced

    def available_slots(self, *, off_stream: bool = False) -> int:
        """Free slots and those that eviction would free."""
        fenced = self._slots.fenced_reclaimable() if off_stream else 0
        return self._slots.available(off_stream=off_stream) + self._slots.reclaimable_count - fenced

    def take_blocks(self, count: int, *, off_stream: bool = False) -> list[BlockId]:
        """`count` blocks, evicting as needed; the caller has checked `available_blocks`."""
        while self._blocks.available(off_stream=off_stream) < count and self.evict_block():
            pass
        return self._blocks.take(count, off_stream=off_stream)

    def take_slot(self, *, off_stream: bool = False) -> SlotId:
        """A slot, evicting as needed; the caller has checked `available_slots`."""
        while self._slots.available(off_stream=off_stream) < 1 and self.evict_slot():
            pass
        return self._slots.take(1, off_stream=off_stream)[0]

    def evict_block(self) -> bool:
        block = self.block_queue.pop()
        if block is None:
            return False
        node = self._tree.block_nodes[block]
        self._tree.drop_block(node)
        if node.parent is not None:
            self.offer_node(node.parent)
        return True

    def evict_slot(self) -> bool:
        slot = self.slot_queue.pop()
        if slot is None:
            return False
        self._tree.drop_state(slot)
        return True

    def offer_node(self, node: Node) -> None:
        """`node` may have become a leaf."""
        if node.kv is not None and self._block_ready(node.kv):
            self.block_queue.offer(node.kv)

    def _block_ready(self, block: BlockId) -> bool:
        node = self._tree.block_nodes.get(block)
        return node is not None and self._blocks.reclaimable[block] and not node.kv_order

    def _slot_position(self, slot: SlotId) -> int:
        node, tail = self._tree.slot_homes[slot]
        return node.state_position(tail)

    def _block_changed(self, block: BlockId, reclaimable: bool) -> None:
        node = self._tree.block_nodes.get(block)
        if node is None:  # just dropped
            return
        self._tree.reclaimable_changed(node)
        self.offer_node(node)

    def _slot_changed(self, slot: SlotId, reclaimable: bool) -> None:
        if reclaimable:
            self.slot_queue.offer(slot)
