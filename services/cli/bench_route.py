"""`twinflow bench route`: the router's policies on a request trace, with simulated workers, in virtual time."""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.topology import size

if TYPE_CHECKING:
    from services.router.bench.replay import Setup
    from services.router.bench.report import Summary

POLICIES = "cost,min_of_groups,attention_only,least_loaded,round_robin"


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "route",
        allow_abbrev=False,
        help="policies of the router on a trace, with simulated workers",
        description="Replays a trace through the router's own view and choice to simulated workers whose times were measured "
        "on one GPU with a 4B hybrid model. Load 1 is the prefill work of the trace, as one cache with the memory of all "
        "prefill workers would leave it, arriving as fast as the prefill workers could do it.",
    )
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE",
        help="Mooncake's JSON lines, sessions in the same format, or Azure's CSV")  # fmt: skip
    add("--limit", type=int, metavar="N", help="only the first N requests")
    add("--copies", type=int, default=1, metavar="N", help="of the trace, with other tokens (default: %(default)s)")
    add("--prefill", type=int, default=4, metavar="N", help="workers (default: %(default)s)")
    add("--decode", type=int, default=4, metavar="N", help="workers (default: %(default)s)")
    add("--loads", default="0.6,0.9,1.2", metavar="A,B", help="default: %(default)s")
    add("--policies", default=POLICIES, metavar="A,B", help="default: %(default)s")
    add("--local-max-tokens", type=int, default=32_768, metavar="N", help="of the router (default: %(default)s)")
    add("--cache-bytes", type=size, default=112 << 30, metavar="SIZE", help="of each worker (default: 112GiB)")
    add("--link-gbytes-per-s", type=float, default=15.0, metavar="RATE", help="default: %(default)s")
    add("--admitted", type=float, default=0.85, metavar="SHARE",
        help="of the prefill workers' time; what is beyond is shed, whatever the policy (default: %(default)s)")  # fmt: skip
    add("--slo-ttft-s", type=float, default=1.0, metavar="S", help="of a good request (default: %(default)s)")
    add("--slo-tpot-s", type=float, default=0.025, metavar="S", help="of a good request (default: %(default)s)")
    add("--rates-off", type=float, default=0.0, metavar="SHARE",
        help="workers seem faster or slower by up to this (default: %(default)s)")  # fmt: skip
    add("--events-late-s", type=float, default=0.0, metavar="S", help="cache events (default: %(default)s)")
    add("--lost-removals", type=float, default=0.0, metavar="SHARE",
        help="of dropped cache entries nobody is told (default: %(default)s)")  # fmt: skip
    add("--parts", type=int, default=1, metavar="N",
        help="parts of the trace, of --limit requests each, that every policy is run on; rows are means, differences from the "
        "first policy are paired by part, with 95 %% intervals (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from services.router.bench import compare
    from services.router.bench.replay import Replay, prepare
    from services.router.bench.report import HEAD, Targets, line, summarise
    from services.router.bench.trace import read_trace
    from services.router.schedule.policies import policy_named

    setup, targets = setup_of(args), Targets(args.slo_ttft_s, args.slo_tpot_s)
    policies = [policy_named(name, local_max_tokens=args.local_max_tokens) for name in args.policies.split(",")]
    loads = [positive("loads", float(load)) for load in args.loads.split(",")]
    parts = int(positive("parts", args.parts))
    workloads = [
        prepare(read_trace(args.trace, args.limit, args.copies, args.seed + part, parts), setup)
        for part in range(parts)
    ]
    requests = sum(len(session) for workload in workloads for session in workload.sessions) // parts
    work_s = sum(workload.work_s for workload in workloads) / parts
    each = f"{parts} parts of {requests}" if parts > 1 else f"{requests}"
    print(f"{args.trace.name}: {each} requests, {work_s:.0f} s of prefill, {setup.prefill}P{setup.decode}D")
    print(HEAD + compare.HEAD + f" {policies[0].name}", flush=True)
    rows: list[dict[str, object]] = []
    for load in loads:
        first: list[Summary] = []
        for policy in policies:
            summaries, spans_s, began_s = [], [], time.process_time()
            for part, workload in enumerate(workloads):
                replay = Replay(workload, replace(setup, seed=setup.seed + part), policy, load)
                summaries.append(summarise(policy.name, load, replay.run(), targets))
                spans_s.append(replay.span_s)
            first = first or summaries
            told, difference = compare.mean(summaries), compare.against(summaries, first)
            compared = "" if first is summaries else compare.cells(difference)
            in_parts = [s.as_json() | {"span_s": span_s} for s, span_s in zip(summaries, spans_s, strict=True)]
            cpu_s = time.process_time() - began_s
            rows.append(told.as_json() | {"against": difference.as_json(), "parts": in_parts, "cpu_s": cpu_s})
            print(line(told) + compared, flush=True)
    if args.json is not None:
        everything = {"trace": args.trace.name, "setup": asdict(setup), "targets": asdict(targets), "rows": rows}
        args.json.write_text(json.dumps(everything, indent=2) + "\n")
    return 0


def setup_of(args: argparse.Namespace) -> "Setup":
    """Raises BadRequest naming the option."""
    from services.router.bench.replay import Setup
    from services.router.bench.timing import Timing
    from services.router.bench.wire import Disturbance
    from twinflow.contracts.errors import BadRequest

    for name in ("rates_off", "lost_removals"):
        if not 0 <= getattr(args, name) < 1:
            raise BadRequest(
                f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 0 and below 1", param=name
            )
    for name in ("prefill", "decode", "admitted", "link_gbytes_per_s", "cache_bytes"):
        positive(name, getattr(args, name))
    return Setup(
        prefill=args.prefill,
        decode=args.decode,
        cache_bytes=args.cache_bytes,
        admitted=args.admitted,
        timing=Timing(link_bytes_per_s=args.link_gbytes_per_s * 1e9),
        disturbance=Disturbance(args.rates_off, args.events_late_s, args.lost_removals),
        seed=args.seed,
    )


def positive(name: str, value: float) -> float:
    from twinflow.contracts.errors import BadRequest

    if value <= 0:
        raise BadRequest(f"--{name.replace('_', '-')} {value} must be more than 0", param=name)
    return value
