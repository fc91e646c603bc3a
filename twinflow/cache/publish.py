"""Puts what holdings have computed into the tree: full blocks on commit, the slot and the partial tail on release.

Everything is labelled from the holding's cursor. A unit pinned by I/O is not published: it may be a destination that is
still being written.
"""

from dataclasses import dataclass
from itertools import takewhile

from twinflow.cache.base import BlockId, Holding, SlotId
from twinflow.cache.pool import Pool
from twinflow.cache.tree import PrefixTree


@dataclass(slots=True)
class Live:
    """An unreleased holding. `saved_tokens`: where its path's deepest checkpoint is that it resumed from or has stored."""

    holding: Holding
    saved_tokens: int = 0


class Publisher:
    def __init__(self, tree: PrefixTree, blocks: Pool[BlockId], slots: Pool[SlotId]) -> None:
        self._tree = tree
        self._blocks = blocks
        self._slots = slots

    def publish(self, holding: Holding, blocks: int) -> None:
        """Publishes the first `blocks` full blocks, as far as they are not pinned. Where the tree has one already, the
        holding's own stays private, until the tree has lost its own."""
        had, pins = self._tree.reach(holding.chain, blocks), self._blocks.pins
        new = holding.blocks[had:blocks]
        if pins:
            new = list(takewhile(lambda block: block not in pins, new))
        if new:
            self._tree.store_blocks(holding.chain, had, new)
        holding.published_blocks = had + len(new)

    def donate(self, holding: Holding, tick: int) -> SlotId | None:
        """The slot becomes the checkpoint at the cursor, the tail block a partial block. What the tree already has stays;
        returns the slot if it was stored."""
        slot = holding.slot
        if slot is None or holding.position == 0:
            return None
        self.publish(holding, holding.position // self._tree.block_tokens)
        there = self._tree.state_at(holding.chain, holding.position)
        new = there is None and slot not in self._slots.pins
        if there is not None:
            self._slots.used[there] = tick
        elif new:
            self._tree.store_state(holding.chain, holding.position, slot)
        self._donate_tail(holding)
        return slot if new else None

    def _donate_tail(self, holding: Holding) -> None:
        """KV is valid up to `written_tokens`, which may be behind or beyond the cursor's tail."""
        step, chain = self._tree.block_tokens, holding.chain
        index = holding.position // step
        start, end = index * step, min(holding.written_tokens, (index + 1) * step)
        if not start < end < start + step:
            return  # nothing, or a full block that was hit
        if self._tree.reach(chain, index) < index:
            return  # the path above is not published; a block here would hang behind a hole
        block = holding.blocks[index]
        _, covered = self._tree.tails.closest(chain.parent(index), chain.packed(start, end))
        if covered < end - start and block not in self._blocks.pins:
            self._tree.store_tail(chain, end, block)
