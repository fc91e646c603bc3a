"""Room in both pools: what is free, what eviction frees, and what moving the boundary between them gives.

The boundary is the number of slots that there are; the blocks are those that fit beside them. It moves slot by slot, only
as far as the floors of the geometry, and only through entries that nobody references. On either side the entry of the
lowest priority goes, wherever it lies; what is next to the boundary and worth more takes its place (a copy on the compute
stream). So bytes go to the side that needs them, not to the one that happens to lie there.

No admission waits for it: `fit` says, before anything is changed, whether a request fits as things are or behind one move;
`take_*` only execute. Blocks are handed out lowest first and slots highest address first, so that the boundary rarely meets
something in use.
"""

import math
from collections.abc import Collection

from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.eviction import Evictor
from twinflow.cache.mover import Mover
from twinflow.cache.pool import Pool, U
from twinflow.cache.tree import PrefixTree
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
        mover: Mover,
    ) -> None:
        self._geometry = geometry
        self._tree = tree
        self._blocks = blocks
        self._slots = slots
        self._evictor = evictor
        self._policy = policy
        self._mover = mover

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
        keep_blocks: Collection[BlockId] = (),
        keep_slot: SlotId | None = None,
        off_stream: bool = False,
    ) -> int | None:
        """How many slots there have to be so that `blocks` and `slots` (0 or 1) more can be taken; None = not now.

        What is in `keep_*` has just been matched and is not evicted for it. `off_stream`: for writers that no queued copy
        may meet.
        """
        kept = sum(self._tree.evictable(b) for b in keep_blocks)
        spare_blocks = self.available_blocks(off_stream=off_stream) - kept - blocks
        idle = keep_slot is not None and bool(self._slots.reclaimable[keep_slot])
        spare_slots = self.available_slots(off_stream=off_stream) - idle - slots
        there = self._slots.total
        if spare_blocks >= 0 and spare_slots >= 0:
            return there
        if spare_blocks >= 0 and spare_slots == -1:
            lost = self._between(there + 1, there)
            ready = all(self._block_ready(b, off_stream) for b in lost) and not set(lost).intersection(keep_blocks)
            return there + 1 if there < self._geometry.slots and ready and len(lost) <= spare_blocks else None
        for fewer in range(there - 1, max(self._geometry.slot_floor, there - spare_slots) - 1, -1):
            slot = self._slots.unit(fewer)
            if slot == keep_slot or not self._slot_ready(slot, off_stream):
                return None
            if self._geometry.blocks_beside(fewer) - self._blocks.total + spare_blocks >= 0:
                return fewer
        return None

    # -- taking it

    def take_blocks(self, count: int, tick: int, *, off_stream: bool = False) -> list[BlockId]:
        """`count` blocks, evicting as needed; the caller has asked `fit`, moved, and taken its slot: what is next to the
        boundary now may be in use a moment later. Slots are given up for them where that loses less."""
        while (short := count - self._blocks.available(off_stream=off_stream)) > 0:
            slot_first, limit = self._slot_should_go(off_stream)
            if slot_first and self._fewer_slots(off_stream):
                continue
            if not self._evictor.evict_blocks(short, limit):
                break
        self._policy.took(count, tick)
        return self._blocks.take(count, off_stream=off_stream)

    def take_slot(self, *, leave_blocks: int = 0, off_stream: bool = False) -> SlotId:
        """A slot, evicting as needed; the caller has asked `fit` and moved. Blocks are given up for it where that loses
        less, as long as `leave_blocks` remain to be taken."""
        while self._slots.available(off_stream=off_stream) < 1:
            there = self._slots.total
            spare = self.available_blocks(off_stream=off_stream) - len(self._between(there + 1, there)) >= leave_blocks
            moved = spare and self._blocks_should_go(off_stream) and self._more_slots(off_stream)
            if not moved and not self._evictor.evict_slot():
                break
        return self._slots.take(1, off_stream=off_stream)[0]

    def lowest_for_slot(self) -> float | None:
        """Priority of what would go for one more slot; None if nothing can."""
        found = [p for p in (self._lowest_slot(), self._lowest_block()) if p is not None]
        return min(found, default=None)

    def move(self, slots: int, *, off_stream: bool = False) -> None:
        """Moves the boundary; the caller knows from `fit` that everything on the way can go."""
        while self._slots.total > slots and self._fewer_slots(off_stream):
            pass
        while self._slots.total < slots and self._more_slots(off_stream):
            pass
        assert self._slots.total == slots

    # -- one step of the boundary

    def _fewer_slots(self, off_stream: bool) -> bool:
        """The slot next to the boundary becomes blocks. What it keeps is dropped if it is worth least or if a transfer
        waits for its bytes, else it moves to the place of what is worth less."""
        fewer = self._slots.total - 1
        if fewer < self._geometry.slot_floor:
            return False
        slot = self._slots.unit(fewer)
        if not self._slot_ready(slot, off_stream):
            return False
        if off_stream and self._slots.reclaimable[slot]:
            self._tree.drop_state(slot)
        elif self._must_move(self._slots, slot):
            if not self._slots.free and not self._evictor.evict_slot():
                return False
            if self._must_move(self._slots, slot):
                self._mover.move_slot(slot)
        fence = self._slots.shrink(fewer)
        self._blocks.extend(self._geometry.blocks_beside(fewer), fence)
        return True

    def _more_slots(self, off_stream: bool) -> bool:
        """The blocks next to the boundary become a slot; as above."""
        more = self._slots.total + 1
        lost = self._between(more, more - 1)
        if more > self._geometry.slots or not all(self._block_ready(b, off_stream) for b in lost):
            return False
        if off_stream:
            for block in lost:
                if self._blocks.published[block]:  # not gone yet with one above it
                    self._evictor.evict_with_descendants(block)
        else:
            while (short := len(lost) - self._blocks.free) > 0:
                if not self._evictor.evict_blocks(short):
                    return False
            for block in lost:
                if self._must_move(self._blocks, block):
                    self._mover.move_block(block)
        fence = self._blocks.shrink(self._geometry.blocks_beside(more))
        self._slots.extend(more, fence)
        return True

    # -- whose loss is smaller

    def _slot_should_go(self, off_stream: bool) -> tuple[bool, float | None]:
        """And up to which priority blocks go instead (`Evictor.evict_blocks`). A slot that should but cannot go cannot while
        nothing but blocks goes."""
        if off_stream:
            return self._slots.is_free(self._slots.unit(self._slots.total - 1)), None
        slot, block = self._lowest_slot(), self._evictor.block_queue.peek()
        should = slot is not None and (block is None or slot < block[0])
        return should, math.inf if slot is None or should else slot

    def _blocks_should_go(self, off_stream: bool) -> bool:
        if off_stream:
            there = self._slots.total
            return all(self._blocks.is_free(b) for b in self._between(there + 1, there))
        slot, block = self._lowest_slot(), self._lowest_block()
        return block is not None and (slot is None or block < slot)

    def _lowest_slot(self) -> float | None:
        """Priority of what goes with the next slot of this side."""
        if self._slots.free:
            return -math.inf
        found = self._evictor.slot_queue.peek()
        return None if found is None else found[0]

    def _lowest_block(self) -> float | None:
        """Priority of what goes with the blocks that one more slot needs, None if the boundary cannot move there."""
        more = self._slots.total + 1
        lost = self._between(more, more - 1)
        if more > self._geometry.slots or not all(self._block_ready(b, off_stream=False) for b in lost):
            return None
        if self._blocks.free >= len(lost):
            return -math.inf
        found = self._evictor.block_queue.peek()
        return None if found is None else found[0]

    def _must_move(self, pool: Pool[U], unit: U) -> bool:
        return bool(pool.reclaimable[unit])

    def _between(self, slots: int, fewer: int) -> list[BlockId]:
        """Blocks that are there beside `fewer` slots and not beside `slots`."""
        return self._blocks.span(self._geometry.blocks_beside(slots), self._geometry.blocks_beside(fewer))

    def _block_ready(self, block: BlockId, off_stream: bool) -> bool:
        """Whether the boundary may pass: free, or nobody's and movable. A transfer cannot wait for a copy: for one, what is
        there must be evicted, with all below it."""
        if self._blocks.is_free(block):
            return not (off_stream and self._blocks.is_fenced(block))
        if not off_stream:
            return bool(self._blocks.reclaimable[block])
        return self._tree.evictable(block) and not self._blocks.is_fenced(block)

    def _slot_ready(self, slot: SlotId, off_stream: bool) -> bool:
        if off_stream and self._slots.is_fenced(slot):
            return False
        return bool(self._slots.reclaimable[slot]) or self._slots.is_free(slot)
