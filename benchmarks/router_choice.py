"""What one routing decision costs the router's CPU: hashing the prompt, looking it up for every worker, choosing.

    python -m benchmarks.router_choice [--entries N] [--prefill N] [--decode N]

A prompt of 32,768 tokens in blocks of 64, of which all workers hold the first half and every eighth worker everything. CPU
time of this thread, the median of many.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from services.router.schedule.base import RouteRequest
from services.router.schedule.choose import choose
from services.router.schedule.policies import policy_named
from services.router.view.prompt import PromptKeys
from services.router.view.view import View
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.workers import Load, Pace, Role, WorkerRecord

TOKENS, BLOCK = 32_768, 64


def record(id: str, role: Role) -> WorkerRecord:
    load = Load(total_slots=256, free_slots=256)
    return WorkerRecord(id, "i", role, (f"{id}:1",), "m", "f", 1 << 20, 1 << 20, BLOCK, False, load, 1 << 21, 50 << 20)


def fill(view: View, records: list[WorkerRecord], prompt: PromptKeys, entries: int) -> None:
    """The prompt's blocks and last state, and other entries up to `entries`."""
    hashes = prompt.block_hashes(records[0])
    random = np.random.default_rng(0)
    for number, r in enumerate(records):
        held = hashes if number % 8 == 0 else hashes[: len(hashes) // 2]
        events = [CacheEvent(i + 1, EventKind.BLOCK_STORED, h, (i + 1) * BLOCK) for i, h in enumerate(held)]
        events.append(CacheEvent(len(events) + 1, EventKind.CHECKPOINT_STORED, held[-2], (len(held) - 1) * BLOCK))
        noise = random.bytes(16 * (entries // len(records)))
        for at in range(0, len(noise), 16):
            events.append(CacheEvent(len(events) + 1, EventKind.BLOCK_STORED, noise[at : at + 16], BLOCK))
        view.apply(r.key, events)


def teach(view: View, records: list[WorkerRecord]) -> None:
    """Every worker has reported steps of both kinds with several lengths and batches, and waits or runs."""
    for number, r in enumerate(records):
        pace = Pace()
        for k in range(1, 9):
            tokens, decoded = (512 << k % 5, 0) if r.role is Role.PREFILL else (0, 16 * k)
            pace = Pace(
                pace.steps + 1, pace.busy_s + 0.01 * k, pace.prefill_tokens + tokens, pace.decode_tokens + decoded
            )
            view.set_load(r.key, Load(number % 7, number % 3, 1000 * (number % 5), total_slots=256, pace=pace))


def cpu_ms(what: Callable[[], object], rounds: int = 41) -> float:
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        what()
        times.append(time.thread_time() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000, help="in the index (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=64)
    parser.add_argument("--decode", type=int, default=192)
    args = parser.parse_args()
    records = [record(f"p{i}", Role.PREFILL) for i in range(args.prefill)]
    records += [record(f"d{i}", Role.DECODE) for i in range(args.decode)]
    packed = np.random.default_rng(1).integers(0, 150_000, TOKENS, dtype=np.uint32).tobytes()
    view, prompt = View(), PromptKeys(packed)
    for r in records:
        view.put(r)
        view.set_connected(r.key, True)
    fill(view, records, prompt, args.entries)
    teach(view, records)
    index, snapshot = view._index, view.snapshot(prompt)
    request, policy = RouteRequest("m", TOKENS, 256, 0), policy_named("cost")
    rows = {
        "hash the prompt": cpu_ms(lambda: PromptKeys(packed).block_keys(records[0])),
        "look it up": cpu_ms(lambda: index.holdings(records[0], prompt, 0.0)),
        "snapshot, with the lookup": cpu_ms(lambda: view.snapshot(prompt)),
        "choose": cpu_ms(lambda: choose(snapshot, request, policy)),
    }
    entries = len(index)
    print(f"{args.prefill}P{args.decode}D, {entries} entries, {view.index_bytes / entries:.1f} B each so far")
    for name, ms in rows.items():
        print(f"{name:<28}{ms:8.3f} ms")


if __name__ == "__main__":
    main()
