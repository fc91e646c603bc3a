"""Puts what holdings have computed into the tree: full blocks on commit, the slot and the partial tail on release.

Everything is labelled from the holding's cursor. A unit pinned by I/O is not published: it may be a destination that is
still being written.
"""

from dataclasses import dataclass

from twinflow.cache.base import BlockId, Holding, SlotId
from twinflow.cache.pool import Pool
from twinflow.cache.tree import Node, PrefixTree


@dataclass(slots=True)
class Live:
    """An unreleased holding and the node of its last published block.

    Where the tree already had a block of the path, the holding's own is private and the tree's may be evicted before the
    holding ends; a node that lost its block is no place to publish below.
    """

    holding: Holding
    tip: Node | None = None
    saved: tuple[Node, bytes] | None = None  # where its path's deepest checkpoint is that it resumed from or has stored

    @property
    def start(self) -> Node | None:
        """The tip while it is good."""
        return self.tip if self.tip is not None and self.tip.kv is not None else None


class Publisher:
    def __init__(self, tree: PrefixTree, blocks: Pool[BlockId], slots: Pool[SlotId]) -> None:
        self._tree = tree
        self._blocks = blocks
        self._slots = slots

    def publish(self, live: Live, blocks: int) -> None:
        """Publishes the first `blocks` full blocks, as far as they are not pinned."""
        holding, step = live.holding, self._tree.block_tokens
        node = live.start or self._tree.root(holding.chain)
        for k in range(node.position // step, blocks):
            tokens = holding.chain.packed(k * step, (k + 1) * step)
            child = node.children.get(tokens)
            if child is None or child.kv is None:
                if self._blocks.pins[holding.blocks[k]]:
                    break
                child = self._tree.store_block(node, tokens, holding.blocks[k])
            node = child
        live.tip = node if node.parent is not None else None
        holding.published_blocks = node.position // step
        self._tree.prune(node)

    def home(self, live: Live, position: int) -> tuple[Node, bytes]:
        """Where a state at `position` belongs: its boundary node (made if missing; prune it when unused) and the tail."""
        chain, blocks = live.holding.chain, position // self._tree.block_tokens
        near = live.start
        if near is not None and near.position > position:
            near = None
        return self._tree.boundary(chain, blocks, near), chain.packed(blocks * self._tree.block_tokens, position)

    def donate(self, live: Live, tick: int) -> SlotId | None:
        """The slot becomes the checkpoint at the cursor, the tail block a partial block. What the tree already has stays;
        returns the slot if it was stored."""
        holding, slot = live.holding, live.holding.slot
        if slot is None or holding.position == 0:
            return None
        self.publish(live, holding.position // self._tree.block_tokens)
        node, tail = self.home(live, holding.position)
        new = tail not in node.states and not self._slots.pins[slot]
        if tail in node.states:
            self._slots.used[node.states[tail]] = tick
        elif new:
            self._tree.store_state(node, tail, slot)
        self._donate_tail(holding, node)
        self._tree.prune(node)
        return slot if new else None

    def _donate_tail(self, holding: Holding, node: Node) -> None:
        """KV is valid up to `written_tokens`, which may be behind or beyond the cursor's tail."""
        if node.kv is None and node.parent is not None:
            return  # the path above is not published; a block here would hang behind a hole
        step, start = self._tree.block_tokens, node.position
        end = min(holding.written_tokens, start + step)
        if not start < end < start + step:
            return  # nothing, or a full block that was hit
        block, tokens = holding.blocks[start // step], holding.chain.packed(start, end)
        covered = self._tree.closest(node, tokens)[1] == end - start
        if not covered and not self._blocks.pins[block]:
            self._tree.store_block(node, tokens, block)
