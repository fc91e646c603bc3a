"""The prefix tree: which tokens' KV is in which block, and at which positions a state is saved.

A full block is known by the chain hash of the boundary that it ends at, which stands for the root and for all tokens before:
looking a prompt up means looking its boundaries up. Blocks and states come and go independently, so a state may be saved
where no block is; but no block is ever published below a missing one, nor dropped above a present one: a reach has no holes,
and is found by bisection.

Everything per block is in flat arrays (`names.py`, `links.py`, and the pool's own), about 50 bytes here; no tokens are kept of
full blocks. What lies inside blocks is in `tails.py`. The tree decides nothing: it does not allocate, count references or
choose what goes.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.events import EventLog
from twinflow.cache.links import Links
from twinflow.cache.names import NameTable
from twinflow.cache.pool import Pool
from twinflow.cache.tails import Partial, Saved, Tails
from twinflow.contracts.events import EventKind
from twinflow.contracts.hashing import TOKEN_BYTES, TokenChain


@dataclass(slots=True)
class Found:
    """One walk: the full blocks in order, a block that serves `common_tokens` more tokens, and the checkpoints ascending.
    Checkpoints may lie beyond the attention reach."""

    full: list[BlockId] = field(default_factory=list)
    common: BlockId | None = None
    common_tokens: int = 0
    checkpoints: dict[int, SlotId] = field(default_factory=dict)  # by position


class PrefixTree:
    def __init__(self, block_tokens: int, blocks: Pool[BlockId], slots: Pool[SlotId], log: EventLog) -> None:
        self.block_tokens = block_tokens
        self.names = NameTable(blocks.size, blocks.unit)  # of full blocks
        self.links = Links(blocks.size, blocks.unit)
        self.tails = Tails(block_tokens)
        self.blocked = array("I", bytes(4 * blocks.size))  # children that cannot be evicted now, or what is below them
        self.dropped: Callable[[SlotId, list[BlockId]], None] | None = None  # told who goes, and its carriers
        self.evictable_blocks = 0  # blocks that can go, counting those whose descendants would have to go first
        self._end = array("I", bytes(4 * blocks.size))  # position in tokens behind the block's last one
        self._laden = bytearray(blocks.size)  # 0: the block carries no checkpoint
        self._blocks = blocks
        self._slots = slots
        self._log = log

    def __len__(self) -> int:
        """Published blocks."""
        return len(self.names) + len(self.tails.partial)

    # -- looking up

    def walk(self, chain: TokenChain) -> Found:
        """Everything held of the chain's tokens; changes nothing."""
        count, step = self.reach(chain), self.block_tokens
        found = Found()
        if count:
            tip = self.names.find(chain.block_hashes[count - 1])
            assert tip is not None
            found.full = self.links.path(tip)
        rest = chain.packed(count * step, min((count + 1) * step, len(chain)))
        found.common, found.common_tokens = self.tails.closest(chain.parent(count), rest)
        states = self.tails.states
        for k in [k for k, name in enumerate((chain.root, *chain.block_hashes)) if name in states]:
            inside = chain.packed(k * step, min((k + 1) * step - 1, len(chain)))
            for tail, slot in self.tails.along(chain.parent(k), inside):
                found.checkpoints[k * step + len(tail) // TOKEN_BYTES] = slot
        return found

    def reach(self, chain: TokenChain, blocks: int | None = None) -> int:
        """How many of the chain's full blocks are published; of its first `blocks`."""
        return bisect_left(chain.block_hashes, True, hi=blocks, key=lambda name: self.names.find(name) is None)

    def state_at(self, chain: TokenChain, position: int) -> SlotId | None:
        """The checkpoint after `position` tokens of the chain."""
        blocks = position // self.block_tokens
        return self.tails.behind(chain.parent(blocks)).get(chain.packed(blocks * self.block_tokens, position))

    def name(self, block: BlockId) -> bytes:
        """Hash of all tokens up to the end of a published block."""
        partial = self.tails.partial.get(block)
        return self.names.name(block) if partial is None else partial.name

    def position(self, block: BlockId) -> int:
        """In tokens, behind the last one of a published block."""
        return self._end[block]

    def is_partial(self, block: BlockId) -> bool:
        return block in self.tails.partial

    def blocks(self) -> Iterator[BlockId]:
        """All published blocks, in order of their ids."""
        at = self._blocks.published.find(1)
        while at >= 0:
            yield self._blocks.unit(at)
            at = self._blocks.published.find(1, at + 1)

    # -- blocks

    def store_blocks(self, chain: TokenChain, first: int, blocks: Sequence[BlockId]) -> None:
        """Publishes held blocks as the chain's full blocks from `first` on, behind a published one."""
        states, names = self.tails.states, chain.block_hashes[first : first + len(blocks)]
        ends = range((first + 1) * self.block_tokens, (first + len(blocks) + 1) * self.block_tokens, self.block_tokens)
        self._add(chain, first, blocks)
        self.names.add_each(names, blocks)
        for block, name, end in zip(blocks, names, ends, strict=True):
            self._end[block], self._laden[block] = end, name in states
        for index, boundary in enumerate((chain.parent(first), *names[:-1])):
            if boundary in states:
                end = ends[index]
                self.tails.add_block(blocks[index], boundary, chain.packed(end - self.block_tokens, end))
                self._laden[blocks[index]] |= bool(self.tails.carried(blocks[index]))
        self._blocks.publish_held(blocks)
        self._log.emit_each(EventKind.BLOCK_STORED, names, ends)

    def store_tail(self, chain: TokenChain, end_tokens: int, block: BlockId) -> None:
        """Publishes a held block of which the chain's tokens up to `end_tokens`, inside the block, are valid."""
        index = end_tokens // self.block_tokens
        self._add(chain, index, (block,))
        self._end[block] = end_tokens
        tokens = chain.packed(index * self.block_tokens, end_tokens)
        self.tails.add_partial(block, Partial(chain.parent(index), tokens))
        self._laden[block] = True
        self._blocks.publish(block)

    def drop_block(self, block: BlockId) -> None:
        """Unpublishes a block that has none below it. An unreferenced one becomes free, a held one private."""
        assert not self.links.has_children(block)
        parent, partial = self.links.parent(block), self.is_partial(block)
        if self.evictable(block):
            self.evictable_blocks -= 1
        else:
            self._unblock(parent)
        self.links.detach(block)
        self.tails.remove_block(block)
        if not partial:
            self.names.remove(block)
        self._blocks.unpublish(block)
        if not partial:
            self._log.emit(EventKind.BLOCK_REMOVED, self.names.name(block), self._end[block])

    def drop_path(self, path: Sequence[BlockId]) -> None:
        """Unpublishes reclaimable blocks, which become free: deepest first, each the only one below the next. None but the
        first carries a checkpoint."""
        assert not self.links.has_children(path[0])
        full = path[1:] if self.is_partial(path[0]) else path
        self.evictable_blocks -= len(path)
        self.links.detach_path(path)
        self.tails.remove_block(path[0])
        names = self.names.remove_all(full)
        self._blocks.discard(path)
        self._log.emit_each(EventKind.BLOCK_REMOVED, names, [self._end[block] for block in full])

    def rehome_block(self, source: BlockId, target: BlockId) -> None:
        """The same KV is in another block from now on. Both are referenced meanwhile."""
        if not self.is_partial(source):
            self.names.remove(source)
            self.names.add(self.names.name(source), target)
        self.links.replace(source, target)
        self.tails.rehome_block(source, target)
        self._end[target], self._laden[target] = self._end[source], self._laden[source]
        self.blocked[target], self.blocked[source] = self.blocked[source], 0
        self._blocks.publish(target)
        self._blocks.unpublish(source)

    # -- states

    def store_state(self, chain: TokenChain, position: int, slot: SlotId) -> None:
        """Publishes a held slot as the state after `position` tokens of the chain, more than none."""
        index = position // self.block_tokens
        saved = Saved(chain.parent(index), chain.packed(index * self.block_tokens, position), position)
        assert position > 0 and slot not in self.tails.saved and saved.tail not in self.tails.behind(saved.boundary)
        inside = saved.tail and index < len(chain.block_hashes)
        self.tails.add_state(saved, slot, self.names.find(chain.block_hashes[index]) if inside else None)
        before = self.names.find(saved.boundary)
        for block in saved.carriers if before is None else (*saved.carriers, before):
            self._laden[block] = True
        self._slots.publish(slot)
        self._log.emit(EventKind.CHECKPOINT_STORED, saved.name, position)

    def drop_state(self, slot: SlotId) -> None:
        """Unpublishes a checkpoint. An unreferenced slot becomes free, a held one its holder's."""
        carriers = self.carriers(slot)
        saved = self.tails.remove_state(slot)
        self._slots.unpublish(slot)
        self._log.emit(EventKind.CHECKPOINT_REMOVED, saved.name, saved.position)
        if self.dropped is not None:
            self.dropped(slot, carriers)

    def rehome_state(self, source: SlotId, target: SlotId) -> None:
        """The same state is in another slot from now on. Both are referenced meanwhile."""
        self.tails.rehome_state(source, target)
        self._slots.publish(target)
        self._slots.unpublish(source)

    def carried(self, block: BlockId) -> list[SlotId]:
        """Checkpoints whose last tokens have their KV in this block, and those behind its end before another one."""
        if not self._laden[block]:
            return []
        tails = self.tails
        behind = None if block in tails.partial else tails.states.get(self.names.name(block))
        return [*behind.values(), *tails.carried(block)] if behind else [*tails.carried(block)]

    def carries(self, slot: SlotId) -> bool:
        """Whether attention reaches the checkpoint in this slot."""
        return bool(self.carriers(slot))

    def carriers(self, slot: SlotId) -> list[BlockId]:
        """Blocks that have the KV of the checkpoint's last tokens."""
        saved = self.tails.saved[slot]
        if saved.tail:
            return saved.carriers
        block = self.names.find(saved.boundary)
        return [] if block is None else [block]

    # -- what can go

    def evictable(self, block: BlockId) -> bool:
        """Whether a block can go, if need be after all that hangs below it."""
        return bool(self._blocks.reclaimable[block]) and not self.blocked[block]

    def reclaimable_changed(self, block: BlockId) -> None:
        """The pool has changed its mind about a published block."""
        if self.blocked[block]:
            return
        if self._blocks.reclaimable[block]:
            self.evictable_blocks += 1
            self._unblock(self.links.parent(block))
        else:
            self.evictable_blocks -= 1
            self._block(self.links.parent(block))

    def _add(self, chain: TokenChain, index: int, blocks: Sequence[BlockId]) -> None:
        """Hangs held blocks, one below the other, below the chain's block before `index`."""
        parent = self.names.find(chain.parent(index)) if index else None
        assert parent is not None or not index
        self.links.attach_path(blocks, parent)
        for block in blocks:
            self.blocked[block] = 1  # by the next one, which is held by its publisher
        self.blocked[blocks[-1]] = 0
        self._block(parent)

    def _block(self, block: BlockId | None) -> None:
        while block is not None:
            self.blocked[block] += 1
            if self.blocked[block] > 1 or not self._blocks.reclaimable[block]:
                return
            self.evictable_blocks -= 1
            block = self.links.parent(block)

    def _unblock(self, block: BlockId | None) -> None:
        while block is not None:
            self.blocked[block] -= 1
            if self.blocked[block] or not self._blocks.reclaimable[block]:
                return
            self.evictable_blocks += 1
            block = self.links.parent(block)
