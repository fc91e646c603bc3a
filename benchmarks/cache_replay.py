"""Replays request traces through the real cache, without a model: which share of the prompts' tokens need no computing?

    python -m benchmarks.cache_replay TRACE... [--gib 32 128 512 ...] [--limit N]

Bytes are those of Qwen3.5-4B: 32,768 of KV per token, 51,511,296 per state. Blocks are as coarse as the trace's own, 512
tokens, since nothing finer can be shared in it. One request at a time: reserve, feed to each position of the checkpoint
plan, store, donate. Compared, at each capacity (columns are per cent of all prompt tokens):

    ours      elastic boundary, eviction by worth, states at boundaries, junctions, intervals and ends
    lru       the same states, least recently used goes first
    prompt    one state per prompt, at its last block boundary; otherwise as ours
    min       as ours, but a hit is the minimum over the groups' own hits, and counts if the state is there
    today     fixed split (a quarter of the bytes for states), LRU, states at the boundary and the end
    fixed     as ours with the best of three fixed splits (1/10, 1/4, 1/2 of the bytes for states)
    live      as ours if the memory of running requests could be moved, too
    ceiling   a cache that forgets nothing and can resume anywhere
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.traces import TRACE_BLOCK_TOKENS, Request, load
from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.checkpoints import CheckpointKind, checkpoint_positions, default_interval_tokens
from twinflow.cache.hybrid import HybridCache
from twinflow.cache.pool import UnitState
from twinflow.cache.worth import Recency, Worth
from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec, TensorSpec
from twinflow.contracts.hashing import TokenChain, root_hash

GIB = 1 << 30
ROOT = root_hash("replay")
SLOT_FLOOR = 2
SHARES = (0.1, 0.25, 0.5)


def qwen35_4b(block_tokens: int = TRACE_BLOCK_TOKENS) -> CacheLayout:
    kv = tuple(TensorSpec(name, (4, 256), "bfloat16") for name in "kv")
    state = (TensorSpec("temporal", (32, 128, 128), "float32"), TensorSpec("conv", (3, 8192), "bfloat16", 1))
    layout = CacheLayout(
        "qwen3.5-4b",
        (
            GroupSpec("attention", GroupKind.ATTENTION, tuple(range(8)), kv, block_tokens),
            GroupSpec("state", GroupKind.STATE, tuple(range(24)), state),
        ),
    )
    assert (layout.block_bytes, layout.slot_bytes) == (32_768 * block_tokens, 51_511_296)
    return layout


class NoCopies:
    def copy_slot(self, source: int, target: int) -> None: ...

    def copy_block(self, source: int, target: int) -> None: ...


@dataclass(frozen=True)
class Variant:
    policy: type[Worth] | type[Recency] = Worth
    kinds: frozenset[CheckpointKind] = frozenset(CheckpointKind)
    state_share: float | None = None  # of a fixed split; None = elastic
    prepare: Callable[[HybridCache], None] | None = None


@dataclass
class Saved:
    tokens: int = 0
    minimum_tokens: int = 0
    seconds: float = 0.0


def geometry(layout: CacheLayout, size: int, share: float | None) -> ArenaGeometry:
    if share is None:
        return ArenaGeometry.split(layout, size, SLOT_FLOOR, block_floor=max(1, size // 4 // layout.block_bytes))
    slots = max(1, int(size * share) // layout.slot_bytes)
    return ArenaGeometry(
        size, layout.block_bytes, layout.slot_bytes, (size - slots * layout.slot_bytes) // layout.block_bytes, slots
    )


def replay(layout: CacheLayout, requests: Sequence[Request], size: int, variant: Variant) -> Saved:
    cache = HybridCache(layout, geometry(layout, size, variant.state_share), NoCopies(), variant.policy)
    if variant.prepare is not None:
        variant.prepare(cache)
    interval = default_interval_tokens(layout)
    saved, started = Saved(), time.perf_counter()
    for request in requests:
        serve(cache, request, variant, interval, saved)
    saved.seconds = time.perf_counter() - started
    cache.check_integrity()
    return saved


def serve(cache: HybridCache, request: Request, variant: Variant, interval: int, saved: Saved) -> None:
    chain = TokenChain(ROOT, cache.layout.block_tokens, request.prompt)
    total = len(chain) + len(request.reply) // 4
    if total > cache.max_request_tokens():
        return
    match = cache.match(chain)
    deepest = match.checkpoints[-1] if match.checkpoints else 0
    minimum = min(match.attention_tokens, deepest, len(chain) - 1)
    saved.minimum_tokens += minimum if minimum in match.checkpoints else 0
    holding = cache.reserve(chain, total)
    assert holding is not None, "an idle cache refused a request that fits"
    saved.tokens += holding.resumed_tokens
    cuts = checkpoint_positions(
        holding.resumed_tokens, holding.written_tokens, len(chain), chain.block_tokens, interval
    )
    for at, kind in cuts.items():
        if kind in variant.kinds:
            cache.advance(holding, at - holding.position)
            cache.commit(holding)
            cache.checkpoint(holding, kind)
    cache.advance(holding, len(chain) - holding.position)
    if request.reply:
        chain.append(memoryview(request.reply).cast("I")[:-1].tolist())  # the last token of a reply is not fed
        cache.advance(holding, len(chain) - holding.position)
    cache.commit(holding)
    cache.release(holding, donate=CheckpointKind.END in variant.kinds)
    cache.end_step(cache.begin_step())
    cache.drain_events()


def ceiling_tokens(requests: Sequence[Request], block_tokens: int) -> int:
    """Longest prefix in whole blocks that any earlier prompt (with its reply, up to its end) had too."""
    seen: set[bytes] = set()
    total = 0
    for request in requests:
        chain = TokenChain(ROOT, block_tokens, request.prompt)
        blocks = 0
        while blocks < (len(chain) - 1) // block_tokens and chain.block_hashes[blocks] in seen:
            blocks += 1
        total += blocks * block_tokens
        chain.append(memoryview(request.reply).cast("I").tolist())
        seen.update(chain.block_hashes)
    return total


PROMPT_END = frozenset({CheckpointKind.BOUNDARY})
VARIANTS = {
    "ours": Variant(),
    "lru": Variant(Recency),
    "prompt": Variant(kinds=PROMPT_END),
    "today": Variant(Recency, frozenset({CheckpointKind.BOUNDARY, CheckpointKind.END}), 0.25),
    "live": Variant(prepare=lambda cache: moves_live_memory(cache)),
    **{f"fixed {share:g}": Variant(state_share=share) for share in SHARES},
}


def moves_live_memory(cache: HybridCache) -> None:
    """The boundary passes through what running requests hold (which no kernel reads here): what could that still add?"""
    blocks, slots, tree, room, mover = cache._blocks, cache._slots, cache._tree, cache._room, cache._mover
    move_block, move_slot = mover.move_block, mover.move_slot

    def any_block(source: BlockId) -> None:
        if not blocks.refs[source]:
            return move_block(source)
        (target,) = blocks.take(1)
        if source in tree.block_nodes:
            tree.rehome_block(source, target)
        for live in cache._live.values():
            live.holding.blocks[:] = [target if b == source else b for b in live.holding.blocks]
        blocks.unref(source, blocks.used[source], retire=False)

    def any_slot(source: SlotId) -> None:
        if not slots.refs[source]:
            return move_slot(source)
        (target,) = slots.take(1)
        for live in cache._live.values():
            if live.holding.slot == source:
                live.holding.slot = target
        slots.unref(source, slots.used[source], retire=False)

    mover.move_block, mover.move_slot = any_block, any_slot  # type: ignore[method-assign]

    def block_ready(block: BlockId, off_stream: bool) -> bool:
        node = tree.block_nodes.get(block)
        whole = node is None or not tree.is_partial(node)
        mine = any(block in live.holding.blocks for live in cache._live.values())
        return not blocks.refs[block] or (blocks.refs[block] == 1 and whole and mine)

    def slot_ready(slot: SlotId, off_stream: bool) -> bool:
        mine = any(slot == live.holding.slot for live in cache._live.values())
        return not slots.refs[slot] or (mine and slot not in tree.slot_homes)

    room._block_ready, room._slot_ready = block_ready, slot_ready  # type: ignore[method-assign]
    room._must_move = lambda pool, unit: pool.state[unit] is not UnitState.FREE  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--gib", nargs="+", type=int, default=[32, 128, 512, 2048])
    parser.add_argument("--limit", type=int, help="only the first N requests")
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT")
    args = parser.parse_args()
    layout = qwen35_4b()
    for path in args.traces:
        requests = load(path, args.limit)
        total = sum(r.prompt_tokens for r in requests)
        ceiling = ceiling_tokens(requests, layout.block_tokens)
        print(f"\n{path.name}: {len(requests)} requests, {total} prompt tokens, ceiling {100 * ceiling / total:.2f} %")
        print(f"{'GiB':>6}" + "".join(f"{name:>11}" for name in ["min", *args.only]) + f"{'s':>8}", flush=True)
        for gib in args.gib:
            results = {name: replay(layout, requests, gib * GIB, VARIANTS[name]) for name in args.only}
            shares = [100 * r.tokens / total for r in results.values()]
            minimum = 100 * results["ours"].minimum_tokens / total if "ours" in results else 0.0
            seconds = sum(r.seconds for r in results.values())
            print(f"{gib:6}" + "".join(f"{s:11.2f}" for s in [minimum, *shares]) + f"{seconds:8.0f}", flush=True)


if __name__ == "__main__":
    main()
