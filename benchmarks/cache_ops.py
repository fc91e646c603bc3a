"""Speed and size of the cache's own work, on one core, without a model.

    python -m benchmarks.cache_ops [--blocks 10000 1000000]

Each line says what was measured, what it is compared with, and whether it holds. Times are medians of processor time: nothing
here waits, so on an idle core that is the time on the clock, and what else the machine does is not in it.

The index is everything that the cache keeps on the host: tree, pools, eviction, checkpoints; from before the cache is made to
when each of its blocks is published. Of few blocks it is what Python's allocator counts, of many the growth of the process.
Once in prompts of 32k tokens with a checkpoint each, once in conversations of 2,000 tokens, each of which ends inside a
block with a checkpoint and a partial block of its own.
"""

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from benchmarks.cache_replay import NoCopies, qwen35_4b
from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.hashing import TokenChain, root_hash

BLOCK_TOKENS = 64
PROMPT_TOKENS = 32_768
TALK_TOKENS = 2_000
SEQUENCES = 256
TRACED_BLOCKS = 100_000  # up to so many blocks: the resident size moves by pages, which is too coarse
ROOT = root_hash("ops")

MATCH_S = 2e-3
STEP_S = 1e-3
BYTES_PER_BLOCK = 160
SLOWER_AT_SCALE = 4.0


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def median_s(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        run()
        times.append(time.thread_time() - started)
    return statistics.median(times)


def filled(blocks: int, tokens: int) -> tuple[HybridCache, list[bytes]]:
    """A cache of which every block is published, in prompts of so many tokens; the first 200 of the prompts."""
    layout = qwen35_4b(BLOCK_TOKENS)
    per_prompt = -(-tokens // BLOCK_TOKENS)
    slots = SEQUENCES + blocks // per_prompt + 1
    rng = np.random.default_rng(0)
    total = blocks * layout.block_bytes + slots * layout.slot_bytes
    cache = HybridCache(layout, ArenaGeometry(total, layout.block_bytes, layout.slot_bytes, blocks, slots), NoCopies())
    prompts = []
    for i in range(blocks // per_prompt):
        prompt = rng.integers(0, 248_320, tokens, dtype=np.uint32).tobytes()
        chain = TokenChain(ROOT, BLOCK_TOKENS, prompt)
        holding = cache.reserve(chain, tokens)
        assert holding is not None
        cache.advance(holding, tokens)
        cache.commit(holding)
        cache.release(holding, donate=True)
        if i < 200:
            prompts.append(prompt)
        cache.drain_events()
    return cache, prompts


def index_bytes(blocks: int, tokens: int) -> float:
    """Per published block."""
    traced = blocks <= TRACED_BLOCKS
    filled(SEQUENCES, tokens)  # what is made once and stays
    gc.collect()
    if traced:
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0] if traced else resident_bytes()
    cache, prompts = filled(blocks, tokens)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0] if traced else resident_bytes()
    tracemalloc.stop()
    published = cache.counts()["attention"].cached
    assert published >= 0.9 * blocks
    return (after - before - sum(map(len, prompts))) / published


def match_s(cache: HybridCache, prompts: list[bytes]) -> float:
    """A full hit: hashing of the prompt included."""
    at = iter(prompts * 10)

    def run() -> None:
        match = cache.match(TokenChain(ROOT, BLOCK_TOKENS, next(at)))
        assert match.attention_tokens == PROMPT_TOKENS

    return median_s(run, min(200, len(prompts) * 10))


def decode_step_s() -> float:
    """One step of 256 decoding sequences: a token appended, fed and committed for each, the step begun and ended."""
    layout = qwen35_4b(BLOCK_TOKENS)
    blocks, slots = SEQUENCES * 16, SEQUENCES + 16
    total = blocks * layout.block_bytes + slots * layout.slot_bytes
    cache = HybridCache(layout, ArenaGeometry(total, layout.block_bytes, layout.slot_bytes, blocks, slots), NoCopies())
    holdings = []
    for i in range(SEQUENCES):
        chain = TokenChain(ROOT, BLOCK_TOKENS, np.full(100 + i, i, dtype=np.uint32).tobytes())
        holding = cache.reserve(chain, len(chain) + 400)
        assert holding is not None
        cache.advance(holding, len(chain))
        cache.commit(holding)
        holdings.append(holding)

    def step() -> None:
        number = cache.begin_step()
        for holding in holdings:
            holding.chain.append((7,))
            cache.advance(holding, 1)
        cache.end_step(number)
        for holding in holdings:
            cache.commit(holding)
        cache.drain_events()

    return median_s(step, 300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", type=int, default=[10_000, 1_000_000])
    args = parser.parse_args()

    def line(what: str, value: float, limit: float, unit: str) -> None:
        print(
            f"{what:66} {value:10.2f} {unit:6} limit {limit:8.2f}  {'ok' if value <= limit else 'MISSED'}", flush=True
        )

    line(f"bookkeeping of a decode step, {SEQUENCES} sequences", 1e3 * decode_step_s(), 1e3 * STEP_S, "ms")
    times = {}
    for blocks in args.blocks:
        for tokens in (PROMPT_TOKENS, TALK_TOKENS):
            what = f"index, all included, of {blocks} blocks in prompts of {tokens}"
            line(what, index_bytes(blocks, tokens), BYTES_PER_BLOCK, "B/blk")
        cache, prompts = filled(blocks, PROMPT_TOKENS)
        times[blocks] = match_s(cache, prompts)
        what = f"full-hit match of {PROMPT_TOKENS} tokens among {blocks} blocks"
        line(what, 1e3 * times[blocks], 1e3 * MATCH_S, "ms")
        del cache, prompts
    few, many = min(times), max(times)
    if few < many:
        line(f"match among {many} blocks against {few}", times[many] / times[few], SLOWER_AT_SCALE, "times")


if __name__ == "__main__":
    main()
