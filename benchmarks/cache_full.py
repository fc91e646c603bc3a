"""What a prompt costs a loop whose cache is full: everything that it takes goes out of the cache at that moment.

    python -m benchmarks.cache_full [--prompt 64 256 1024] [--cache 16384] [--profile]

The cache, with the bytes of Qwen3.5-4B in blocks of 64 tokens, is filled with prompts of `--prompt` blocks that share
nothing. Further ones come, one after the other: on a decode worker by hand-offs, with the calls of `engine/pulls.py`, on a
prefill worker computed in chunks. The loop does nothing else meanwhile. Microseconds of processor time per block of the
prompt, the least of all prompts for which as many blocks went: nothing here waits, and what makes it longer is the machine.

    told       the end of a hand-off's prompt, with all of its blocks
    match      what has come into the cache meanwhile
    complete   memory for a hand-off; `free`: where it is free, so that the rest is eviction
    pull       from there until the transfer thread has it: destinations named and pinned, the reads planned
    unpin      the reads are done
    adopt      confirmed
    publish    the first step has landed: the received blocks are published
    reserve    memory for a prompt that is computed here; `free` as above
    chunks     published chunk by chunk, all of them
    release    of what is published, with the state
    events     of one prompt, those removed and those stored, made ready for the pipe to the front

`--profile` tells where the time of `complete` goes, by function, under a profiler that makes everything slower.
"""

import argparse
import cProfile
import gc
import pickle
import pstats
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from benchmarks.cache_replay import NoCopies, qwen35_4b
from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.base import BlockId, Holding, SlotId
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.checkpoints import CheckpointKind
from twinflow.contracts.events import EventColumns, EventKind
from twinflow.contracts.hashing import TokenChain, root_hash
from twinflow.contracts.tags import StateTag
from twinflow.transfer.base import PeerArena
from twinflow.transfer.intake import Intake, Pull, Unpin
from twinflow.transfer.plan import plan_pull

BLOCK_TOKENS = 64
CHUNK_BLOCKS = 32  # of 2,048 tokens
REPLY_TOKENS = 100
SLOTS = 16  # besides one for each prompt that is kept
ROOT = root_hash("full")
T = TypeVar("T")


class Worker:
    """A full cache. `spent`: seconds of processor time by part, one for each prompt that came and was measured."""

    def __init__(self, prompt_blocks: int, cache_blocks: int, *, computes: bool) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.profile: cProfile.Profile | None = None
        self._blocks = prompt_blocks
        self._computes = computes
        self._layout = layout = qwen35_4b(BLOCK_TOKENS)
        slots = SLOTS + 2 * (cache_blocks // prompt_blocks)
        total = cache_blocks * layout.block_bytes + slots * layout.slot_bytes
        geometry = ArenaGeometry(total, layout.block_bytes, layout.slot_bytes, cache_blocks, slots)
        self._geometry = geometry
        self._peer = PeerArena(
            "p", "i", 1, 0, total, layout.block_bytes, layout.slot_bytes, cache_blocks, slots, "DRAM", 0, "a", b""
        )
        self.cache = HybridCache(layout, geometry, NoCopies())
        self._rng = np.random.default_rng(0)
        self._fingerprint = layout.fingerprint()
        self._coming = 0

    def prompt(self) -> TokenChain:
        """Unlike all before; it ends inside a block, as most do."""
        tokens = self._blocks * BLOCK_TOKENS + 1
        return TokenChain(ROOT, BLOCK_TOKENS, self._rng.integers(0, 248_320, tokens, dtype=np.uint32).tobytes())

    def fill(self) -> None:
        while self.come() < self._blocks:
            pass
        self.spent.clear()

    def come(self, suffix: str = "") -> int:
        """The next prompt comes, is answered and stays. How many blocks went for it."""
        chain = self.prompt()
        holding = self._compute(chain, suffix) if self._computes else self._receive(chain, suffix)
        self._timed("release", lambda: self.cache.release(holding, donate=True))
        events = self.cache.drain_events()
        self._timed("events" + suffix, lambda: pickle.dumps(EventColumns.of(events)))
        return sum(event.kind == EventKind.BLOCK_REMOVED for event in events)

    def _receive(self, chain: TokenChain, suffix: str) -> Holding:
        cache, tokens = self.cache, len(chain)
        self._coming += 1
        tag = StateTag(chain.prefix_hash(tokens), tokens, self._fingerprint)
        received = Intake(str(self._coming), BLOCK_TOKENS, 0, tag)
        holding = cache.hold_prefix(chain)
        theirs = tuple(range(received.total_blocks))
        self._timed("told", lambda: received.finished(0, theirs, (), 0, 0, tag))
        self._timed("match", lambda: cache.release(cache.hold_prefix(chain), donate=False))

        if self.profile is not None:
            self.profile.enable()
        took = self._timed("complete" + suffix, lambda: cache.complete(holding, tokens + REPLY_TOKENS))
        if self.profile is not None:
            self.profile.disable()
        assert took and holding.slot is not None

        def pull() -> str:
            assert holding.slot is not None
            (action,) = received.reserved(holding.blocks, holding.slot)
            assert isinstance(action, Pull)
            cache.pin_io((BlockId(b) for _, b in action.blocks), (SlotId(s) for _, s in action.slots))
            plan_pull(self._geometry, self._peer, action.blocks, action.slots)
            return action.pull_id

        def unpin() -> None:
            for action in received.pull_finished(name, True):
                if isinstance(action, Unpin):
                    cache.unpin_io(map(BlockId, action.blocks), map(SlotId, action.slots))

        def adopt() -> None:
            cache.adopt(holding, tag)
            cache.checkpoint(holding, CheckpointKind.RECEIVED)

        name = self._timed("pull", pull)
        self._timed("unpin", unpin)
        received.confirmed()
        self._timed("adopt", adopt)
        step = cache.begin_step()
        chain.push(1)
        cache.end_step(step)
        self._timed("publish", lambda: cache.advance_each((holding,)))
        return holding

    def _compute(self, chain: TokenChain, suffix: str) -> Holding:
        cache, tokens = self.cache, len(chain)
        holding = self._timed("reserve" + suffix, lambda: cache.reserve(chain, tokens))
        assert holding is not None
        chunk = CHUNK_BLOCKS * BLOCK_TOKENS

        def chunks() -> None:
            assert holding is not None
            for at in range(0, tokens, chunk):
                step = cache.begin_step()
                cache.advance(holding, min(chunk, tokens - at))
                cache.end_step(step)
                cache.commit(holding)

        self._timed("chunks", chunks)
        return holding

    def _timed(self, part: str, call: Callable[[], T]) -> T:
        began = time.thread_time()
        result = call()
        self.spent[part].append(time.thread_time() - began)
        return result


def measure(prompt_blocks: int, cache_blocks: int, prompts: int, *, computes: bool) -> Worker:
    worker = Worker(prompt_blocks, cache_blocks, computes=computes)
    worker.fill()
    gc.collect()
    gc.disable()  # a worker's collector leaves alone what was there before
    for _ in range(prompts):
        if worker.come() < prompt_blocks:
            for spent in worker.spent.values():
                spent.pop()
    for _ in range(max(3, prompts // 4)):
        worker.cache.flush()
        worker.cache.drain_events()
        worker.come(" free")
    gc.enable()
    worker.cache.check_integrity()
    return worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", nargs="+", type=int, default=[64, 256, 1024], help="blocks of a prompt")
    parser.add_argument("--cache", type=int, default=16_384, help="blocks of the cache")
    parser.add_argument("--prompts", type=int, default=64, help="that come to a full cache")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for blocks in args.prompt:
        for side, computes in (("decode", False), ("prefill", True)):
            worker = measure(blocks, args.cache, args.prompts, computes=computes)
            parts = {name: 1e6 * min(each) / blocks for name, each in worker.spent.items()}
            told = ", ".join(f"{name} {us:.2f}" for name, us in parts.items())
            print(f"{side:8} {blocks:5} blocks   µs per block: {told}", flush=True)
    if args.profile:
        worker = Worker(args.prompt[0], args.cache, computes=False)
        worker.fill()
        worker.profile = cProfile.Profile()
        for _ in range(args.prompts):
            worker.come()
        pstats.Stats(worker.profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
