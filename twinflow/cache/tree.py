"""The prefix tree: which tokens' KV is in which block, and at which positions a state is saved.

A node is a block boundary; the path of token bytes from a root leads to it, so a hit always compares real tokens and the
hash is only its name in events. A node keeps `kv` (the block that ends here) and `states` (tail tokens past the boundary →
slot). A partial block is a leaf whose key is shorter than a block. Blocks and slots come and go independently, so a node
may have states without `kv`; but no block is ever published below a missing one, nor dropped above a present one: a reach
has no holes.

The tree decides nothing: it does not allocate, count references or choose what goes.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.events import EventLog
from twinflow.cache.pool import Pool
from twinflow.contracts.events import EventKind
from twinflow.contracts.hashing import TOKEN_BYTES, TokenChain, block_hash, tail_hash

NO_STATES: dict[bytes, SlotId] = {}  # of the many nodes without any; never written to


@dataclass(slots=True, eq=False)
class Node:
    """`tokens` are packed ids of the block that ends here (the key in `parent`), `position` is the end in tokens."""

    parent: "Node | None"
    tokens: bytes
    prefix_hash: bytes
    position: int
    kv: BlockId | None = None
    children: dict[bytes, "Node"] = field(default_factory=dict)
    kv_order: list[bytes] = field(default_factory=list)  # sorted keys of the children that have kv
    states: dict[bytes, SlotId] = field(default_factory=lambda: NO_STATES)
    blocked: int = 0  # children whose block cannot be evicted now, itself or because of what is below it

    def state_hash(self, tail: bytes) -> bytes:
        return tail_hash(self.prefix_hash, tail) if tail else self.prefix_hash

    def state_position(self, tail: bytes) -> int:
        return self.position + len(tail) // TOKEN_BYTES


@dataclass(slots=True)
class Found:
    """One walk: the full blocks in order, a block that shares `common_tokens` more tokens, and the checkpoints ascending.
    Checkpoints may lie beyond the attention reach."""

    full: list[Node] = field(default_factory=list)
    common: Node | None = None
    common_tokens: int = 0
    checkpoints: dict[int, SlotId] = field(default_factory=dict)  # by position


def common_prefix_tokens(a: bytes, b: bytes) -> int:
    """Tokens that two packed sequences share at their start."""
    n = min(len(a), len(b))
    differing = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return (n - (differing.bit_length() + 7) // 8) // TOKEN_BYTES


class PrefixTree:
    def __init__(self, block_tokens: int, blocks: Pool[BlockId], slots: Pool[SlotId], log: EventLog) -> None:
        self.block_tokens = block_tokens
        self.roots: dict[bytes, Node] = {}
        self.block_nodes: dict[BlockId, Node] = {}
        self.slot_homes: dict[SlotId, tuple[Node, bytes]] = {}  # (boundary node, tail)
        self.dropped: Callable[[SlotId, Node, bytes], None] | None = None  # told of every checkpoint that goes
        self.evictable_blocks = 0  # blocks that can go, counting those whose descendants would have to go first
        self._step = block_tokens * TOKEN_BYTES
        self._blocks = blocks
        self._slots = slots
        self._log = log

    def walk(self, chain: TokenChain) -> Found:
        """Everything held of the chain's tokens. O(blocks of the chain); changes nothing."""
        found = Found()
        node = self.roots.get(chain.root)
        packed = chain.packed()
        at = 0
        reached = False  # the attention reach has ended
        while node is not None:
            if node.states:
                self._collect_checkpoints(node, packed, at, found.checkpoints)
            child = node.children.get(packed[at : at + self._step]) if at + self._step <= len(packed) else None
            if not reached:
                if child is not None and child.kv is not None:
                    found.full.append(child)
                else:
                    reached = True
                    found.common, found.common_tokens = self.closest(node, packed[at : at + self._step])
            node = child
            at += self._step
        return found

    def closest(self, node: Node, tokens: bytes) -> tuple[Node | None, int]:
        """The child with a block that shares most tokens with `tokens`, and how many; (None, 0) if none shares any.

        In sorted order a longest common prefix is always with a neighbour of the insertion point.
        """
        best, best_tokens = None, 0
        at = bisect_right(node.kv_order, tokens)
        for key in node.kv_order[max(0, at - 1) : at + 1]:
            shared = common_prefix_tokens(key, tokens)
            if shared > best_tokens:
                best, best_tokens = node.children[key], shared
        return best, best_tokens

    def boundary(self, chain: TokenChain, blocks: int, near: Node | None = None) -> Node:
        """The node after `blocks` full blocks of the chain, made if missing. `near`: a live node on that path to start from."""
        node = near if near is not None else self.root(chain)
        for k in range(node.position // self.block_tokens, blocks):
            tokens = chain.packed(k * self.block_tokens, (k + 1) * self.block_tokens)
            node = node.children.get(tokens) or self._add(node, tokens)
        return node

    def root(self, chain: TokenChain) -> Node:
        return self.roots.setdefault(chain.root, Node(None, b"", chain.root, 0))

    def store_block(self, parent: Node, tokens: bytes, block: BlockId) -> Node:
        """Publishes a held block below `parent` (which has its own block, or is a root)."""
        assert block not in self.block_nodes and (parent.kv is not None or parent.parent is None)
        node = parent.children.get(tokens) or self._add(parent, tokens)
        assert node.kv is None
        node.kv = block
        self.block_nodes[block] = node
        insort(parent.kv_order, tokens)
        self._block(parent)  # held by its publisher
        self._blocks.publish(block)
        if not self.is_partial(node):
            self._log.emit(EventKind.BLOCK_STORED, node.prefix_hash, node.position)
        return node

    def drop_block(self, node: Node) -> None:
        """Unpublishes a block that has no block below it. An unreferenced one becomes free, a held one private."""
        block, parent = node.kv, node.parent
        assert block is not None and parent is not None and not node.kv_order
        evictable = self.evictable(node)
        del self.block_nodes[block]
        node.kv = None
        parent.kv_order.remove(node.tokens)
        if evictable:
            self.evictable_blocks -= 1
        else:
            self._unblock(parent)
        self._blocks.unpublish(block)
        if not self.is_partial(node):
            self._log.emit(EventKind.BLOCK_REMOVED, node.prefix_hash, node.position)
        self.prune(node)

    def store_state(self, node: Node, tail: bytes, slot: SlotId) -> None:
        assert slot not in self.slot_homes and tail not in node.states and (tail or node.parent is not None)
        if node.states is NO_STATES:
            node.states = {}
        node.states[tail] = slot
        self.slot_homes[slot] = (node, tail)
        self._slots.publish(slot)
        self._log.emit(EventKind.CHECKPOINT_STORED, node.state_hash(tail), node.state_position(tail))

    def drop_state(self, slot: SlotId) -> None:
        """Unpublishes a checkpoint. An unreferenced slot becomes free, a held one its holder's."""
        node, tail = self.slot_homes.pop(slot)
        del node.states[tail]
        if not node.states:
            node.states = NO_STATES
        self._slots.unpublish(slot)
        self._log.emit(EventKind.CHECKPOINT_REMOVED, node.state_hash(tail), node.state_position(tail))
        if self.dropped is not None:
            self.dropped(slot, node, tail)
        self.prune(node)

    def rehome_block(self, source: BlockId, target: BlockId) -> None:
        """The same KV is in another block from now on. Both are referenced meanwhile."""
        node = self.block_nodes.pop(source)
        node.kv = target
        self.block_nodes[target] = node
        self._blocks.publish(target)
        self._blocks.unpublish(source)

    def rehome_state(self, source: SlotId, target: SlotId) -> None:
        """The same state is in another slot from now on. Both are referenced meanwhile."""
        node, tail = self.slot_homes[target] = self.slot_homes.pop(source)
        node.states[tail] = target
        self._slots.publish(target)
        self._slots.unpublish(source)

    def prune(self, node: Node) -> None:
        """Removes `node` and its ancestors as far as they keep nothing."""
        at: Node | None = node
        while at is not None and at.kv is None and not at.children and not at.states:
            if at.parent is None:
                self.roots.pop(at.prefix_hash, None)
            else:
                at.parent.children.pop(at.tokens, None)
            at = at.parent

    def is_partial(self, node: Node) -> bool:
        return node.position % self.block_tokens != 0

    def evictable(self, node: Node) -> bool:
        return node.kv is not None and bool(self._blocks.reclaimable[node.kv]) and not node.blocked

    def reclaimable_changed(self, node: Node) -> None:
        """The pool has changed its mind about the node's own block."""
        assert node.kv is not None and node.parent is not None
        if node.blocked:
            return
        if self._blocks.reclaimable[node.kv]:
            self.evictable_blocks += 1
            self._unblock(node.parent)
        else:
            self.evictable_blocks -= 1
            self._block(node.parent)

    def carried(self, node: Node) -> list[SlotId]:
        """Checkpoints whose last tokens have their KV in the node's own block."""
        slots = list(node.states.values())
        beside = node.parent.states if node.parent is not None else None
        if not beside:
            return slots
        if len(beside) > self.block_tokens:
            tails = [node.tokens[:end] for end in range(TOKEN_BYTES, len(node.tokens) + 1, TOKEN_BYTES)]
            return slots + [beside[t] for t in tails if t in beside]
        return slots + [slot for tail, slot in beside.items() if tail and node.tokens.startswith(tail)]

    def carries(self, node: Node, tail: bytes) -> bool:
        """Whether attention reaches the checkpoint after `tail` behind the node's boundary."""
        if node.kv is None and node.parent is not None:
            return False
        return not tail or self.closest(node, tail)[1] * TOKEN_BYTES == len(tail)

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents before children. O(tree)."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _add(self, parent: Node, tokens: bytes) -> Node:
        name = block_hash if len(tokens) == self._step else tail_hash
        position = parent.position + len(tokens) // TOKEN_BYTES
        node = parent.children[tokens] = Node(parent, tokens, name(parent.prefix_hash, tokens), position)
        return node

    def _collect_checkpoints(self, node: Node, packed: bytes, at: int, into: dict[int, SlotId]) -> None:
        if len(node.states) > self.block_tokens:  # many siblings: look up each length instead of comparing each tail
            ends = range(at, min(at + self._step, len(packed) + 1), TOKEN_BYTES)
            tails = [packed[at:end] for end in ends if packed[at:end] in node.states]
        else:
            tails = sorted((t for t in node.states if packed.startswith(t, at)), key=len)
        for tail in tails:
            into[node.state_position(tail)] = node.states[tail]

    def _block(self, node: Node | None) -> None:
        while node is not None and node.parent is not None:  # a root has no block
            node.blocked += 1
            if node.blocked > 1 or node.kv is None or not self._blocks.reclaimable[node.kv]:
                return
            self.evictable_blocks -= 1
            node = node.parent

    def _unblock(self, node: Node | None) -> None:
        while node is not None and node.parent is not None:
            node.blocked -= 1
            if node.blocked or node.kv is None or not self._blocks.reclaimable[node.kv]:
                return
            self.evictable_blocks += 1
            node = node.parent
