"""Room in both pools: what is free, what eviction frees, and what moving the boundary between them gives.

The boundary is the number of slots that there are; the blocks are those that fit beside them. It moves slot by slot, by
evicting entries next to it that nobody references, and only as far as the floors of the geometry. No admission waits for
it: `fit` says, before anything is changed, whether a request fits as things are or behind one move; `take_*` only execute.

Blocks are handed out lowest first and slots highest address first, so what is next to the boundary is mostly free, or the
youngest.
"""

from collections.abc import Collection

from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.eviction import Evictor
from twinflow.cache.pool import Pool, UnitState
from twinflow.cache.tree import Node, PrefixTree
from twinflow.cache.worth import Policy


class Room:
    def __init__(
        self,
        geometry: ArenaGeometry,
        tree: PrefixTree,
        blocks: Pool[BlockId],
        slots: Pool[SlotId],
        evictor: Evictor,
        policy: Policy,
    ) -> None:
        self._geometry = geometry
        self._tree = tree
        self._blocks = blocks
        self._slots = slots
        self._evictor = evictor
        self._policy = policy

    # -- what there is

    def available_blocks(self, *, off_stream: bool = False) -> int:
        """Free blocks and those that eviction would free."""
        fenced = self._blocks.fenced_reclaimable() if off_stream else 0
        return self._blocks.available(off_stream=off_stream) + self._tree.evictable_blocks - fenced

    def available_slots(self, *, off_stream: bool = False) -> int:
        """Free slots and those that eviction would free."""
        fenced = self._slots.fenced_reclaimable() if off_stream else 0
        return self._slots.available(off_stream=off_stream) + self._slots.reclaimable_count - fenced

    def fit(
        self,
        blocks: int,
        slots: int,
        *,
        keep_blocks: Collection[Node] = (),
        keep_slot: SlotId | None = None,
        off_stream: bool = False,
    ) -> int | None:
        """How many slots there have to be so that `blocks` and `slots` (0 or 1) more can be taken; None = not now.

        What is in `keep_*` has just been matched and is not evicted for it. `off_stream`: for writers that no queued copy
        may meet.
        """
        kept = sum(self._tree.evictable(n) for n in keep_blocks)
        spare_blocks = self.available_blocks(off_stream=off_stream) - kept - blocks
        idle = keep_slot is not None and self._slots.reclaimable[keep_slot]
        spare_slots = self.available_slots(off_stream=off_stream) - idle - slots
        there = self._slots.total
        if spare_blocks >= 0 and spare_slots >= 0:
            return there
        if spare_blocks >= 0 and spare_slots == -1:
            kept_ids = {n.kv for n in keep_blocks}
            lost = self._between(there + 1, there)
            ready = all(self._block_ready(b, off_stream) and b not in kept_ids for b in lost)
            return there + 1 if there < self._geometry.slots and ready and len(lost) <= spare_blocks else None
        for fewer in range(there - 1, max(self._geometry.slot_floor, there - spare_slots) - 1, -1):
            slot = self._slots.units[fewer]
            if slot == keep_slot or not self._slot_ready(slot, off_stream):
                return None
            if self._geometry.blocks_beside(fewer) - self._blocks.total + spare_blocks >= 0:
                return fewer
        return None

    # -- taking it

    def take_blocks(self, count: int, tick: int, *, leave_slots: int = 0, off_stream: bool = False) -> list[BlockId]:
        """`count` blocks, evicting as needed; the caller has asked `fit` and moved. A slot is given up for it where that
        costs less, as long as `leave_slots` remain to be taken."""
        while (missing := count - self._blocks.available(off_stream=off_stream)) > 0:
            spare = self.available_slots(off_stream=off_stream) > leave_slots
            if not (spare and self._give_slot(missing, tick)) and not self._evictor.evict_block():
                break
        self._policy.took(count, tick)
        return self._blocks.take(count, off_stream=off_stream)

    def take_slot(self, tick: int, *, off_stream: bool = False) -> SlotId:
        """A slot, evicting as needed; the caller has asked `fit` and moved."""
        while self._slots.available(off_stream=off_stream) < 1:
            if not self._give_blocks(tick) and not self._evictor.evict_slot():
                break
        return self._slots.take(1, off_stream=off_stream)[0]

    def cheapest_slot(self, tick: int) -> float | None:
        """What is lost with the next slot; 0 for a free one, None if there is none."""
        if self._slots.available(off_stream=False):
            return 0.0
        own = self._own_slot_cost(tick)
        moved = self._blocks_cost(tick)
        return min((c for c in (own, moved) if c is not None), default=None)

    def move(self, slots: int) -> None:
        """Moves the boundary; the caller knows from `fit` that everything on the way can go."""
        if slots < self._slots.total:
            gone = self._slots.units[slots : self._slots.total]
            for slot in gone:
                if slot in self._tree.slot_homes:
                    self._tree.drop_state(slot)
            self._slots.shrink(slots)
            self._blocks.extend(self._geometry.blocks_beside(slots), self._slots.fence_over(gone))
        elif slots > self._slots.total:
            lost = self._between(slots, self._slots.total)
            for block in lost:
                node = self._tree.block_nodes.get(block)
                if node is not None:
                    self._evictor.evict_with_descendants(node)
            self._blocks.shrink(self._geometry.blocks_beside(slots))
            self._slots.extend(slots, self._blocks.fence_over(lost))

    # -- whose loss is smaller

    def _give_slot(self, missing_blocks: int, tick: int) -> bool:
        """Turns the slot next to the boundary into blocks if that loses less than evicting blocks."""
        fewer = self._slots.total - 1
        if fewer < self._geometry.slot_floor:
            return False
        slot = self._slots.units[fewer]
        if not self._slot_ready(slot, off_stream=False):
            return False
        if self._slots.reclaimable[slot]:
            gained = self._geometry.blocks_beside(fewer) - self._blocks.total
            next_block = self._evictor.block_queue.peek()
            if next_block is not None:
                evicted = min(gained, missing_blocks) * self._geometry.block_bytes
                if self._slot_cost(slot, tick) > evicted * self._policy.cost(next_block[0], tick):
                    return False
        self.move(fewer)
        return True

    def _give_blocks(self, tick: int) -> bool:
        """Turns the blocks next to the boundary into a slot if that loses less than evicting one."""
        moved = self._blocks_cost(tick)
        if moved is None:
            return False
        own = self._own_slot_cost(tick)
        if own is not None and own < moved:
            return False
        self.move(self._slots.total + 1)
        return True

    def _own_slot_cost(self, tick: int) -> float | None:
        found = self._evictor.slot_queue.peek()
        return None if found is None else self._geometry.slot_bytes * self._policy.cost(found[0], tick)

    def _slot_cost(self, slot: SlotId, tick: int) -> float:
        return self._geometry.slot_bytes * self._policy.cost(self._policy.slot(slot), tick)

    def _blocks_cost(self, tick: int) -> float | None:
        """What is lost with the blocks that one more slot needs, None if they cannot go."""
        there = self._slots.total
        if there >= self._geometry.slots:
            return None
        lost = self._between(there + 1, there)
        if not all(self._block_ready(b, off_stream=False) for b in lost):
            return None
        cost, seen = 0.0, set[BlockId]()
        for block in lost:
            node = self._tree.block_nodes.get(block)
            for each in self._evictor.subtree(node) if node is not None else ():
                if each.kv is not None and each.kv not in seen:
                    seen.add(each.kv)
                    cost += self._geometry.block_bytes * self._policy.cost(self._policy.block(each.kv), tick)
        return cost

    def _between(self, slots: int, fewer: int) -> list[BlockId]:
        """Blocks that are there beside `fewer` slots and not beside `slots`."""
        return self._blocks.units[self._geometry.blocks_beside(slots) : self._geometry.blocks_beside(fewer)]

    def _block_ready(self, block: BlockId, off_stream: bool) -> bool:
        if off_stream and self._blocks.is_fenced(block):
            return False
        node = self._tree.block_nodes.get(block)
        return self._tree.evictable(node) if node is not None else self._blocks.state[block] is UnitState.FREE

    def _slot_ready(self, slot: SlotId, off_stream: bool) -> bool:
        if off_stream and self._slots.is_fenced(slot):
            return False
        return self._slots.reclaimable[slot] or self._slots.state[slot] is UnitState.FREE
