"""Replays request traces through the real cache, without a model: which share of the prompts' tokens need no computing?

    python -m benchmarks.cache_replay TRACE... [--gib 32 128 512 ...] [--json out.json]
    python -m benchmarks.cache_replay TRACE... --quick

Bytes are those of Qwen3.5-4B: 32,768 of KV per token, 51,511,296 per state. Blocks are as coarse as the trace's own, 512
tokens, since nothing finer can be shared in it. Each trace runs twice (`replay_server.py`): one request at a time, and with
requests that overlap and hold their memory for as long as they would. Compared, at each capacity (columns are per cent of
all prompt tokens):

    ours      elastic boundary, eviction by worth, states at boundaries, junctions, intervals and ends
    lru       the same states, least recently used goes first
    prompt    one state per prompt, at its last block boundary; otherwise as ours
    min       as ours, but a hit is the minimum over the groups' own hits, and counts if the state is there
    fixed S   as ours with a fixed split, S of the bytes for states
    unified   as ours if the boundary could pass through the memory of running requests (`unified_memory.py`)
    ceiling   a cache that forgets nothing and can resume anywhere

The first 3,000 requests of the conversation trace, on which the constants of eviction were chosen, are a row of their own.
"""

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.replay_server import Outcome, Server
from benchmarks.traces import TRACE_BLOCK_TOKENS, Ceiling, Request, Service, ceiling, load
from benchmarks.unified_memory import unify
from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.hybrid import HybridCache
from twinflow.cache.worth import Recency, Worth
from twinflow.contracts.checkpoints import CheckpointKind, default_interval_tokens
from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec, TensorSpec

GIB = 1 << 30
MAX_RUNNING, CHECKPOINT_SLOTS = 32, 16
SHARES = (0.1, 0.25)
TUNED_ON = {"mooncake_conversation_trace": 3_000}  # the constants of eviction were chosen on its first requests
MODES = {"one at a time": Service(hold=0.0), "overlapping": Service(), "busy": Service(hold=4.0)}
SIZES_GIB, ALL_GIB = (32, 128, 512), 4096  # contested; and room for everything
QUICK_LIMIT, QUICK_GIB = 400, (8, 32)


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


FIXED = tuple(f"fixed {share:g}" for share in SHARES)
VARIANTS = {
    "ours": Variant(),
    "lru": Variant(Recency),
    "prompt": Variant(kinds=frozenset({CheckpointKind.BOUNDARY})),
    **{name: Variant(state_share=share) for name, share in zip(FIXED, SHARES, strict=True)},
    "unified": Variant(prepare=unify),
}
RIVALS = ("lru", "prompt", "min")
WORSE_AT_MOST = 0.005  # of the tokens that a rival saves


def geometry(layout: CacheLayout, size: int, share: float | None) -> ArenaGeometry:
    """As a worker's, or split for good."""
    if share is None:
        return ArenaGeometry.split(layout, size, MAX_RUNNING + CHECKPOINT_SLOTS)
    slots = max(1, int(size * share) // layout.slot_bytes)
    return ArenaGeometry(
        size, layout.block_bytes, layout.slot_bytes, (size - slots * layout.slot_bytes) // layout.block_bytes, slots
    )


def replay(layout: CacheLayout, requests: Sequence[Request], size: int, variant: Variant, service: Service) -> Outcome:
    cache = HybridCache(layout, geometry(layout, size, variant.state_share), NoCopies(), variant.policy)
    if variant.prepare is not None:
        variant.prepare(cache)
    interval = default_interval_tokens(layout)
    server = Server(cache, layout.block_tokens, interval, service, MAX_RUNNING, variant.kinds)
    outcome = server.run(requests)
    cache.check_integrity()
    assert all(c.held == c.doomed == 0 for c in cache.counts().values()), f"still held at the end: {cache.counts()}"
    return outcome


@dataclass(frozen=True)
class Run:
    """One replay of one trace: what a process of the pool does."""

    trace: Path
    limit: int | None
    mode: str
    gib: int
    variant: str

    def __call__(self) -> Outcome:
        requests = load_once(self.trace, self.limit)
        return replay(qwen35_4b(), requests, self.gib * GIB, VARIANTS[self.variant], MODES[self.mode])


load_once = functools.lru_cache(maxsize=1)(load)


def call(run: Run) -> Outcome:
    return run()


def runs_of(traces: Sequence[Path], limit: int | None, modes: Sequence[str], sizes: Sequence[int]) -> list[Run]:
    """The boundary is compared where requests overlap, since there alone much is held, and where space is short: not at the
    largest size."""
    runs = []
    for trace in traces:
        for mode in modes:
            for gib in sizes:
                boundary = (*FIXED, "unified") if mode == "overlapping" and gib < max(sizes) else ()
                runs += [Run(trace, limit, mode, gib, variant) for variant in ("ours", "lru", "prompt", *boundary)]
            runs.append(Run(trace, limit, mode, ALL_GIB, "ours"))
    return runs


@dataclass(frozen=True)
class Point:
    """A row of the table: per cent of the prompt tokens of `part` that needed no computing, by column.

    `tuned`: the constants of eviction were chosen on these requests. `holds`: the capacity is at least the KV of all of the
    trace's distinct prefixes."""

    part: str
    tuned: bool
    mode: str
    gib: int
    holds: bool
    ceiling: float
    shares: dict[str, float]


def parts_of(trace: Path, requests: int) -> Iterator[tuple[str, bool, slice]]:
    cut = TUNED_ON.get(trace.stem, 0)
    short = " ".join(trace.stem.removeprefix("mooncake_").removesuffix("_trace").split("_")[:3])
    if 0 < cut < requests:
        yield f"{short} 1–{cut:,}", True, slice(0, cut)
        yield f"{short} {cut + 1:,}–{requests:,}", False, slice(cut, requests)
    else:
        yield short, cut > 0, slice(0, requests)


def points_of(
    trace: Path, requests: Sequence[Request], limits: Ceiling, outcomes: dict[Run, Outcome]
) -> Iterator[Point]:
    needs = limits.distinct_tokens * 32_768
    for part, tuned, where in parts_of(trace, len(requests)):
        percent = 100 / sum(r.prompt_tokens for r in requests[where])
        for mode, gib in dict.fromkeys((run.mode, run.gib) for run in outcomes if run.trace == trace):
            here = {r.variant: o for r, o in outcomes.items() if (r.trace, r.mode, r.gib) == (trace, mode, gib)}
            shares = {name: percent * sum(o.resumed[where]) for name, o in here.items()}
            shares["min"] = percent * sum(here["ours"].minimum[where])
            most = percent * sum(limits.tokens[where])
            yield Point(part, tuned, mode, gib, gib * GIB >= needs, most, shares)


COLUMNS = ("ours", "lru", "prompt", "min", *FIXED, "unified")


def table(points: Sequence[Point]) -> str:
    """Markdown."""
    lines = ["| requests | mode | GiB | " + " | ".join(COLUMNS) + " | ceiling |", "|---" * (4 + len(COLUMNS)) + "|"]
    for p in points:
        cells = [f"{p.shares[name]:.2f}" if name in p.shares else "" for name in COLUMNS]
        lines.append(f"| {p.part} | {p.mode} | {p.gib:,} | " + " | ".join(cells) + f" | {p.ceiling:.2f} |")
    return "\n".join(lines)


def verdicts(points: Sequence[Point]) -> Iterator[str]:
    """Ours beside each other column: in points (per cent of the prompt tokens), and in tokens saved relative to the other's."""
    for label, tuned in (("held out", False), ("tuned on", True)):
        chosen = [p for p in points if p.tuned is tuned]
        for name in (*RIVALS, *FIXED, "unified"):
            pairs = [(p.shares["ours"], p.shares[name]) for p in chosen if name in p.shares]
            if not pairs:
                continue
            gained = [ours - other for ours, other in pairs]
            line = f"{label}, {len(pairs)} rows: ours against {name}: worst {min(gained):+.2f} points, mean {_mean(gained):+.2f}"
            more = [100 * (ours / other - 1) for ours, other in pairs if other]
            yield line + (f"; worst {min(more):+.1f} %, mean {_mean(more):+.1f} %" if more else "")
        full = [100 * p.shares["ours"] / p.ceiling for p in chosen if p.holds]
        if full:
            yield f"{label}: where the capacity holds everything: at least {min(full):.1f} % of the ceiling"


def misses(points: Sequence[Point]) -> Iterator[str]:
    """Where ours saves less than a rival by more than `WORSE_AT_MOST` of what that one saves, on what is held out."""
    pairs = [(p, name) for p in points if not p.tuned for name in RIVALS if name in p.shares]
    missed = [(p, name) for p, name in pairs if p.shares["ours"] < (1 - WORSE_AT_MOST) * p.shares[name]]
    yield (
        f"held out: never less than {', '.join(RIVALS)} by more than {WORSE_AT_MOST:.1%} of the tokens that they save: "
        f"{len(pairs) - len(missed)} of {len(pairs)} comparisons"
    )
    for p, name in missed:
        ours, other = p.shares["ours"], p.shares[name]
        yield f"  MISSED {p.part}, {p.mode}, {p.gib:,} GiB: {ours:.2f} against {other:.2f} of {name}, {ours / other - 1:+.1%}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def report(traces: Sequence[Path], limit: int | None, outcomes: dict[Run, Outcome]) -> list[Point]:
    points: list[Point] = []
    for trace in traces:
        whole = load(trace)
        requests = whole[:limit]
        most = ceiling(requests)
        tokens = sum(r.prompt_tokens for r in requests)
        print(
            f"{trace.name}: {len(requests):,} of {len(whole):,} requests, {tokens:,} prompt tokens, "
            f"{most.distinct_tokens * 32_768 / GIB:,.0f} GiB of KV to keep all; block hit ratio of an unlimited cache over "
            f"the whole trace {ceiling(whole).block_ratio:.3f}"
        )
        for run, outcome in outcomes.items():
            if run.trace == trace and run.variant == "ours":
                print(
                    f"  {run.mode}, {run.gib} GiB: at most {outcome.most_running} running, "
                    f"{outcome.running_s / max(1.0, requests[-1].arrival_s):.1f} on average, {outcome.waited} waited, "
                    f"{outcome.yields} yields, {len(outcome.refused)} refused"
                )
        points += points_of(trace, requests, most, outcomes)
    print("\n" + table(points) + "\n", *verdicts(points), *misses(points), sep="\n")
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--gib", nargs="+", type=int, default=SIZES_GIB)
    parser.add_argument("--modes", nargs="+", default=["one at a time", "overlapping"], choices=list(MODES))
    parser.add_argument("--limit", type=int, help="first requests of a trace (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LIMIT} requests, {QUICK_GIB} GiB")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument("--json", type=Path, help="the points, for cache_picture")
    args = parser.parse_args()
    limit, sizes = (QUICK_LIMIT, QUICK_GIB) if args.quick else (args.limit, args.gib)
    runs = runs_of(args.traces, limit, args.modes, sizes)
    started = time.perf_counter()
    if args.jobs == 1:
        outcomes = {run: run() for run in runs}
    else:
        with ProcessPoolExecutor(args.jobs) as pool:
            outcomes = dict(zip(runs, pool.map(call, runs), strict=True))
    points = report(args.traces, limit, outcomes)
    print(f"{len(runs)} replays in {(time.perf_counter() - started) / 60:.1f} min with {args.jobs} processes")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(p) for p in points], indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
