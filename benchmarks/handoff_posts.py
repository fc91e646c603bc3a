"""What posting a READ costs, and how many descriptors a hand-off takes.

    python -m benchmarks.handoff_posts

Part 1, pure: a prompt's blocks as the pools hand them out, fresh and after a lot of traffic; descriptors before and after
coalescing. Part 2, real NIXL, one process reading from another over shared memory: microseconds per post for building the
descriptor lists from numpy (what `NixlTransport` does), against lists prepared once per peer and picked by index, which
cannot coalesce.
"""

import argparse
import json
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from twinflow.cache.arena import ArenaGeometry
from twinflow.transfer.base import PeerArena, ReadRange
from twinflow.transfer.plan import plan_pull, split_posts

BLOCK_BYTES, SLOT_BYTES, BLOCKS, SLOTS = 64 << 10, 1 << 20, 2048, 16
GEOMETRY = ArenaGeometry(BLOCK_BYTES * BLOCKS + SLOT_BYTES * SLOTS, BLOCK_BYTES, SLOT_BYTES, BLOCKS, SLOTS)


def pool_after(churn: int, seed: int) -> list[int]:
    """256 blocks as a lowest-first pool gives them, after `churn` requests of 1 to 64 blocks came and went."""
    rng = random.Random(seed)
    free, running = list(range(BLOCKS)), []
    for _ in range(churn):
        n = rng.randint(1, 64)
        if len(free) > 512 + n:
            free.sort()
            running.append(free[:n])
            del free[:n]
        if running and rng.random() < 0.6:
            free += running.pop(rng.randrange(len(running)))
    return sorted(free)[:256]


def descriptors(churn: int) -> dict[str, float]:
    """Mean over seeds, of a prompt of 256 blocks and its slot."""
    peer = PeerArena("p", "i", 1, 0, GEOMETRY.total_bytes, BLOCK_BYTES, SLOT_BYTES, BLOCKS, SLOTS, "DRAM", 0, "a", b"")
    counts, posts = [], []
    for seed in range(20):
        pairs = list(zip(pool_after(churn, seed), pool_after(churn, 1000 + seed), strict=True))
        ranges = plan_pull(GEOMETRY, peer, pairs, [(0, 0)])
        counts.append(len(ranges))
        posts.append(len(split_posts(ranges)))
    return {"units": 257, "descriptors": float(np.mean(counts)), "posts": float(np.mean(posts))}


def serve(conn: Connection) -> None:
    import torch

    from twinflow.transfer.nixl import NixlTransport

    storage = torch.ones(GEOMETRY.total_bytes, dtype=torch.uint8)
    transport = NixlTransport("p/i/1", storage)
    conn.send((transport.agent_metadata, storage.data_ptr()))
    while not conn.poll(0.0005):
        transport.progress()
    transport.close()


def posting(rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of making, posting and releasing a READ of so many single blocks, by way of building its lists; and of
    posting alone, which over shared memory includes the copy."""
    import torch

    from twinflow.transfer.nixl import NixlTransport

    context = multiprocessing.get_context("spawn")
    conn, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    metadata, address = conn.recv()
    storage = torch.zeros(GEOMETRY.total_bytes, dtype=torch.uint8)
    transport = NixlTransport("d/i/1", storage)
    peer = PeerArena(
        "p", "i", 1, address, GEOMETRY.total_bytes, BLOCK_BYTES, SLOT_BYTES, BLOCKS, SLOTS, "DRAM", 0, "p/i/1", metadata
    )
    transport.connect(peer)
    agent: Any = transport._agent
    base = storage.data_ptr()

    def table(at: int) -> Any:
        out = np.empty((BLOCKS, 3), dtype=np.uint64)
        out[:, 0] = at + np.arange(BLOCKS, dtype=np.uint64) * np.uint64(BLOCK_BYTES)
        out[:, 1:] = BLOCK_BYTES, 0
        return out

    near = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(table(base), "DRAM"))
    far = agent.prep_xfer_dlist("p/i/1", agent.get_xfer_descs(table(address), "DRAM"))
    out: dict[str, dict[str, float]] = {}
    for n in (1, 8, 64, 256):
        picked = [2 * i for i in range(n)]
        ranges = [ReadRange(i * BLOCK_BYTES, i * BLOCK_BYTES, BLOCK_BYTES) for i in picked]
        lists = np.array([(base + r.local_offset, r.length, 0) for r in ranges], dtype=np.uint64)
        theirs_ = np.array([(address + r.remote_offset, r.length, 0) for r in ranges], dtype=np.uint64)

        def built(lists: Any = lists, far_: Any = theirs_) -> Any:
            return agent.initialize_xfer(
                "READ", agent.get_xfer_descs(lists, "DRAM"), agent.get_xfer_descs(far_, "DRAM"), "p/i/1"
            )

        def prepared(picked: list[int] = picked) -> Any:
            return agent.make_prepped_xfer("READ", near, picked, far, picked)

        def whole(ranges: list[ReadRange] = ranges) -> None:
            handle = transport.post(peer.key, ranges)
            while not transport.poll(handle):
                pass
            transport.free(handle)

        whole()  # connected and warm
        row = {}
        for name, make in (("built_us", built), ("prepared_us", prepared)):
            row[name] = best_us(lambda make=make: make().release(), rounds)
        row["post_to_done_us"] = best_us(whole, max(5, rounds // 10))
        out[f"{n} descriptors"] = {k: round(v, 1) for k, v in row.items()}
    conn.send("stop")
    server.join(10)
    transport.close()
    return out


def best_us(call: Any, rounds: int) -> float:
    """Median of five means: the machine is shared."""
    means = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(rounds):
            call()
        means.append((time.perf_counter() - began) / rounds * 1e6)
    return sorted(means)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    for churn in (0, 100, 10_000):
        print(json.dumps({"requests before": churn, **descriptors(churn)}))
    for name, row in posting(args.rounds).items():
        print(json.dumps({name: row}))


if __name__ == "__main__":
    main()
