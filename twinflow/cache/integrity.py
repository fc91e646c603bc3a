"""The full walk over pools, tree and holdings. For tests and the idle loop: O(everything)."""

from collections import Counter
from collections.abc import Sequence

from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.base import BlockId, Holding, SlotId
from twinflow.cache.eviction import Evictor
from twinflow.cache.pool import Pool, U, UnitState
from twinflow.cache.tree import PrefixTree
from twinflow.contracts.hashing import TOKEN_BYTES


def check(
    tree: PrefixTree,
    blocks: Pool[BlockId],
    slots: Pool[SlotId],
    evictor: Evictor,
    holdings: Sequence[Holding],
    geometry: ArenaGeometry,
) -> None:
    """Raises AssertionError naming the first thing that is wrong."""
    published = set(tree.blocks())
    _check_pool(blocks, Counter(b for h in holdings for b in h.blocks), published)
    _check_pool(slots, Counter(s for h in holdings for s in h.slots), set(tree.tails.saved))
    for holding in holdings:
        _check_holding(holding, tree, blocks)
    _check_tree(tree, published)
    _check_tails(tree, published)
    _check_queues(tree, blocks, slots, evictor)
    assert blocks.total == geometry.blocks_beside(slots.total), f"{blocks.total} blocks beside {slots.total} slots"
    assert blocks.total >= geometry.block_floor and slots.total >= geometry.slot_floor, "below the floor"
    if blocks.total and slots.total:
        end = geometry.block_offset(blocks.total - 1) + geometry.block_bytes
        assert end <= geometry.slot_offset(slots.total - 1), "blocks and slots overlap"


def _check_pool(pool: Pool[U], refs: "Counter[U]", published: set[U]) -> None:
    tally: Counter[int] = Counter()
    for u in pool.span(0, pool.size):
        what, state = f"{pool.name} {u}", UnitState(pool.state[u])
        assert pool.refs[u] == refs[u], f"{what}: {pool.refs[u]} references, but {refs[u]} in holdings"
        assert pool.published[u] == (u in published), f"{what}: published={pool.published[u]} disagrees with the tree"
        expected = UnitState(pool.expected_state(u))
        assert state is expected, f"{what} is {state.name}, not {expected.name}"
        reclaimable = pool.published[u] and pool.exclusive(u, references=0)
        assert pool.reclaimable[u] == reclaimable, f"{what}: reclaimable={pool.reclaimable[u]}"
        assert pool.published[u] or pool.refs[u] <= 1, f"{what} is private but has {pool.refs[u]} references"
        tally[state] += 1
    counts = pool.counts()
    found = tuple(tally[s] for s in UnitState)
    assert (counts.free, counts.cached, counts.held, counts.doomed) == found[:4], (
        f"{pool.name}: {counts}, found {found}"
    )
    assert sum(found[:4]) == counts.total == pool.total, f"{pool.name}: {counts} does not add up"
    assert all(n > 0 for n in pool.pins.values()), f"{pool.name}: {counts} miscounts pins"
    assert pool.reclaimable_count == sum(pool.reclaimable), f"{pool.name}: reclaimable count"
    lowest = pool.state.find(UnitState.FREE)
    assert lowest < 0 or lowest >= pool.lowest, f"{pool.name} {lowest} is free but would not be found"


def _check_holding(h: Holding, tree: PrefixTree, blocks: Pool[BlockId]) -> None:
    assert not h.released
    assert len(set(h.blocks)) == len(h.blocks), "a holding has a block twice"
    assert 0 <= h.position <= h.written_tokens <= len(h.blocks) * tree.block_tokens, f"cursor: {h}"
    assert h.written_tokens <= len(h.chain), "more KV than tokens"
    for slot in (h.slot, *(slot for slot, _ in h.snapshots.values())):
        assert slot is None or slot not in tree.tails.saved, f"slot {slot} is written by a holding and published"
    assert list(h.snapshots) == sorted(h.snapshots), f"snapshots out of order: {h}"
    for k, block in enumerate(h.blocks):
        if blocks.published[block]:
            end = (k + 1) * tree.block_tokens
            assert not tree.is_partial(block) and tree.position(block) == end, f"block {block}: another position"
            assert tree.name(block) == h.chain.prefix_hash(end), f"block {block}: other tokens"
            assert end <= h.written_tokens, f"block {block} is published beyond the written tokens"


def _check_tree(tree: PrefixTree, published: set[BlockId]) -> None:
    evictable = 0
    for block in published:
        what = f"block {block} up to {tree.position(block)}"
        partial = tree.is_partial(block)
        assert partial or tree.names.find(tree.name(block)) == block, f"{what} is not found under its name"
        parent = tree.links.parent(block)
        start = 0 if parent is None else tree.position(parent)
        valid = tree.position(block) - start
        assert valid == tree.block_tokens or (partial and 0 < valid < tree.block_tokens), f"{what} begins at {start}"
        assert parent is None or (parent in published and block in tree.links.children(parent)), (
            f"{what}: behind a hole"
        )
        children = list(tree.links.children(block))
        assert not (partial and children), f"{what} is partial but has something below"
        assert all(tree.links.parent(c) == block for c in children), f"{what}: children of another block"
        blocked = sum(not tree.evictable(c) for c in children)
        assert tree.blocked[block] == blocked, f"{what}: blocked={tree.blocked[block]}, found {blocked}"
        evictable += tree.evictable(block)
    assert len(tree) == len(published), f"{len(tree)} blocks counted, {len(published)} found"
    assert evictable == tree.evictable_blocks, f"{tree.evictable_blocks} evictable blocks counted, {evictable} found"


def _check_tails(tree: PrefixTree, published: set[BlockId]) -> None:
    tails, full_bytes = tree.tails, tree.block_tokens * TOKEN_BYTES
    listed = {slot: (at, tail) for at, here in tails.states.items() for tail, slot in here.items()}
    assert listed == {s: (saved.boundary, saved.tail) for s, saved in tails.saved.items()}, (
        "checkpoints are listed elsewhere"
    )
    assert all(tails.states.values()), "a boundary without states is listed"
    for slot, saved in tails.saved.items():
        what = f"checkpoint {slot} at {saved.position}"
        assert len(saved.tail) == saved.position % tree.block_tokens * TOKEN_BYTES, (
            f"{what}: tail of {len(saved.tail)} B"
        )
        assert saved.tail or not saved.carriers, f"{what} lies at a boundary and has carriers"
        assert len(set(saved.carriers)) == len(saved.carriers), f"{what}: carried twice by a block"
        before = tree.names.find(saved.boundary)
        for block in saved.carriers if before is None else (*saved.carriers, before):
            assert slot in tree.carried(block), f"{what}: {block} is taken for bare"
        for block in saved.carriers:
            assert block in published and slot in tails.carried(block), f"{what}: {block} does not carry it"
            assert _boundary(tree, block) in (saved.boundary, None), f"{what}: {block} lies behind another boundary"
            partial = tails.partial.get(block)
            assert partial is None or partial.tokens.startswith(saved.tail), f"{what}: {block} has other tokens"
    for block, partial in tails.partial.items():
        what = f"partial block {block}"
        assert block in published and _boundary(tree, block) in (partial.boundary, None), f"{what}: another boundary"
        assert 0 < len(partial.tokens) < full_bytes, f"{what}: {len(partial.tokens)} B"
        for tail, slot in tails.along(partial.boundary, partial.tokens):
            assert not tail or block in tails.saved[slot].carriers, f"{what} does not know that it carries {slot}"
    carried = [(b, s) for b in published for s in tails.carried(b)]
    assert len(carried) == sum(len(s.carriers) for s in tails.saved.values()), "a block carries what is gone"


def _boundary(tree: PrefixTree, block: BlockId) -> bytes | None:
    """Name of where the block begins; None for the first of a chain, whose root is not kept."""
    parent = tree.links.parent(block)
    return None if parent is None else tree.name(parent)


def _check_queues(tree: PrefixTree, blocks: Pool[BlockId], slots: Pool[SlotId], evictor: Evictor) -> None:
    for block in tree.blocks():
        leaf = tree.evictable(block) and not tree.links.has_children(block)
        assert not leaf or block in evictor.block_queue, f"block {block} could be evicted but is not queued"
    for slot in tree.tails.saved:
        assert not slots.reclaimable[slot] or slot in evictor.slot_queue, f"slot {slot} could go but is not queued"
    evictor.block_queue.check_order()
    evictor.slot_queue.check_order()
