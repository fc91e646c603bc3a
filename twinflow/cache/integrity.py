"""The full walk over pools, tree and holdings. For tests and the idle loop: O(everything)."""

from collections import Counter
from collections.abc import Sequence

from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.base import BlockId, Holding, SlotId
from twinflow.cache.eviction import Evictor
from twinflow.cache.pool import Pool, U, UnitState
from twinflow.cache.tree import Node, PrefixTree
from twinflow.contracts.hashing import TOKEN_BYTES, block_hash, tail_hash


def check(
    tree: PrefixTree,
    blocks: Pool[BlockId],
    slots: Pool[SlotId],
    evictor: Evictor,
    holdings: Sequence[Holding],
    geometry: ArenaGeometry,
) -> None:
    """Raises AssertionError naming the first thing that is wrong."""
    _check_pool(blocks, Counter(b for h in holdings for b in h.blocks), set(tree.block_nodes))
    _check_pool(slots, Counter(h.slot for h in holdings if h.slot is not None), set(tree.slot_homes))
    for holding in holdings:
        _check_holding(holding, tree, blocks)
    _check_tree(tree, blocks)
    offered = evictor.block_queue.units()
    for block, node in tree.block_nodes.items():
        leaf = tree.evictable(node) and not node.kv_order
        assert not leaf or block in offered, f"block {block} could be evicted but is not queued"
    waiting = {s for s in tree.slot_homes if slots.reclaimable[s]} - evictor.slot_queue.units()
    assert not waiting, f"slots {waiting} could be evicted but are not queued"
    assert blocks.total == geometry.blocks_beside(slots.total), f"{blocks.total} blocks beside {slots.total} slots"
    assert blocks.total >= geometry.block_floor and slots.total >= geometry.slot_floor, "below the floor"
    if blocks.total and slots.total:
        end = geometry.block_offset(blocks.total - 1) + geometry.block_bytes
        assert end <= geometry.slot_offset(slots.total - 1), "blocks and slots overlap"


def _check_pool(pool: Pool[U], refs: "Counter[U]", published: set[U]) -> None:
    tally: Counter[UnitState] = Counter()
    for u in pool.units:
        what = f"{pool.name} {u}"
        assert pool.refs[u] == refs[u], f"{what}: {pool.refs[u]} references, but {refs[u]} in holdings"
        assert pool.published[u] == (u in published), f"{what}: published={pool.published[u]} disagrees with the tree"
        assert pool.state[u] is pool.expected_state(u), (
            f"{what} is {pool.state[u].name}, not {pool.expected_state(u).name}"
        )
        reclaimable = pool.published[u] and pool.exclusive(u, references=0)
        assert pool.reclaimable[u] == reclaimable, f"{what}: reclaimable={pool.reclaimable[u]}"
        assert pool.published[u] or pool.refs[u] <= 1, f"{what} is private but has {pool.refs[u]} references"
        tally[pool.state[u]] += 1
    counts = pool.counts()
    found = tuple(tally[s] for s in UnitState)
    assert (counts.free, counts.cached, counts.held, counts.doomed) == found[:4], (
        f"{pool.name}: {counts}, found {found}"
    )
    assert sum(found[:4]) == counts.total == pool.total, f"{pool.name}: {counts} does not add up"
    assert counts.pinned_by_io == sum(n > 0 for n in pool.pins), f"{pool.name}: {counts} miscounts pins"
    assert pool.reclaimable_count == sum(pool.reclaimable), f"{pool.name}: reclaimable count"
    free = {u for u in pool.units if pool.state[u] is UnitState.FREE}
    assert free <= pool.listed_units(), f"{pool.name}: {free - pool.listed_units()} are free but not listed"


def _check_holding(h: Holding, tree: PrefixTree, blocks: Pool[BlockId]) -> None:
    assert not h.released
    assert len(set(h.blocks)) == len(h.blocks), "a holding has a block twice"
    assert 0 <= h.position <= h.written_tokens <= len(h.blocks) * tree.block_tokens, f"cursor: {h}"
    assert h.written_tokens <= len(h.chain), "more KV than tokens"
    assert h.slot is None or h.slot not in tree.slot_homes, f"slot {h.slot} is written by a holding and published"
    for k, block in enumerate(h.blocks):
        node = tree.block_nodes.get(block)
        if node is not None:
            end = (k + 1) * tree.block_tokens
            assert node.position == end and node.prefix_hash == h.chain.prefix_hash(end), f"block {block}: other tokens"
            assert end <= h.written_tokens, f"block {block} is published beyond the written tokens"


def _check_tree(tree: PrefixTree, blocks: Pool[BlockId]) -> None:
    seen_blocks: dict[BlockId, Node] = {}
    seen_slots: dict[SlotId, tuple[Node, bytes]] = {}
    evictable = 0
    for node in tree.nodes():
        _check_node(node, tree, blocks)
        evictable += tree.evictable(node)
        if node.kv is not None:
            seen_blocks[node.kv] = node
        for tail, slot in node.states.items():
            seen_slots[slot] = (node, tail)
    assert seen_blocks == tree.block_nodes, "blocks of the tree differ from their index"
    assert seen_slots == tree.slot_homes, "slots of the tree differ from their index"
    assert evictable == tree.evictable_blocks, f"{tree.evictable_blocks} evictable blocks counted, {evictable} found"


def _check_node(node: Node, tree: PrefixTree, blocks: Pool[BlockId]) -> None:
    what = f"node at {node.position}"
    full_bytes = tree.block_tokens * TOKEN_BYTES
    assert node.kv is not None or node.children or node.states, f"{what} keeps nothing"
    if node.parent is None:
        assert node.kv is None and node.position == 0 and tree.roots[node.prefix_hash] is node, f"{what}: bad root"
    else:
        name = tail_hash if tree.is_partial(node) else block_hash
        assert node.parent.children[node.tokens] is node, f"{what} is not its parent's child"
        assert node.prefix_hash == name(node.parent.prefix_hash, node.tokens), f"{what}: hash of other tokens"
        assert node.position == node.parent.position + len(node.tokens) // TOKEN_BYTES, f"{what}: position"
        assert node.kv is None or node.parent.parent is None or node.parent.kv is not None, f"{what} is behind a hole"
    assert 0 < len(node.tokens) <= full_bytes or node.parent is None, f"{what}: block of {len(node.tokens)} B"
    assert not (tree.is_partial(node) and (node.children or node.states)), f"{what} is partial but has something below"
    with_kv = [c for c in node.children.values() if c.kv is not None]
    assert node.kv_order == sorted(c.tokens for c in with_kv), f"{what}: order of children"
    if node.parent is not None:
        assert node.blocked == sum(not tree.evictable(c) for c in with_kv), f"{what}: blocked={node.blocked}"
    assert all(len(t) < full_bytes and len(t) % TOKEN_BYTES == 0 for t in node.states), f"{what}: tail too long"
