"""`twinflow bench engine`: times a worker's engine on this machine, row by row, beside the least time its device could take."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli import bench_handoff, bench_route
from services.cli.topology import size

if TYPE_CHECKING:
    from twinflow.bench.floor import Footprint
    from twinflow.bench.rates import Rates
    from twinflow.bench.run import Result

STEP_TOKENS = 16384


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bench",
        allow_abbrev=False,
        help="measure an engine on its device, hand-offs between two, or the router's policies on a trace",
        description="Measures on this machine, with nothing else running beside it.",
    )
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT", help="engine, route or handoff")
    bench_route.add_parser(kinds)
    bench_handoff.add_parser(kinds)
    engine = kinds.add_parser(
        "engine",
        allow_abbrev=False,
        help="prefill and decode of one worker's engine",
        description="Measures the device's copy, read and matrix rates, then rows of prefill (prefill:BATCHxTOKENS, prompts "
        "from nothing) and decode (decode:BATCH@TOKENS, one step of sequences with so many tokens behind them) through a "
        "real engine with real requests. Floor = the longer of bytes over the copy rate and operations over the matrix rate.",
    )
    add = engine.add_argument
    add("--model", required=True, metavar="MODEL", help="folder or hub id; with --load-format dummy also a config.json")
    add("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights, a config is enough")
    add("--dtype", default="auto", help="of weights and KV: auto, float32, bfloat16 or float16 (default: %(default)s)")
    add("--state-dtype", default="float32", help="of temporal states (default: %(default)s)")
    add("--device", default="cuda", help="cpu, cuda or cuda:N (default: %(default)s)")
    add("--rows", metavar="ROWS", help="comma-separated, e.g. prefill:1x4096,decode:32@1024 (default: five and eight)")
    add("--rounds", type=int, default=3, metavar="N", help="of each row; the median counts (default: %(default)s)")
    add("--steps", type=int, default=32, metavar="N", help="of a decode row's round (default: %(default)s)")
    add("--step-tokens", type=int, default=STEP_TOKENS, metavar="N",
        help="token budget of one step, also of one prompt in it (default: %(default)s)")  # fmt: skip
    add("--block-tokens", type=int, metavar="N", help="of an attention block (default: a worker's)")
    add("--cache-bytes", type=size, metavar="SIZE", help="of the arena (default: what the rows need)")
    add("--steps-in-flight", type=int, metavar="N", help="launched before the oldest has ended (default: a worker's)")
    add("--cuda-graphs", choices=("auto", "off"), help="default: a worker's")
    add("--profile", type=int, nargs="?", const=20, default=0, metavar="N",
        help="also list the N kernels of each row that take longest (default N: 20)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Imports what needs torch."""
    from services.cli import bench_table as table
    from twinflow.bench.rows import STANDARD, parse_rows
    from twinflow.bench.run import Bench, config_for
    from twinflow.contracts.errors import BadRequest

    for name in ("rounds", "steps"):
        if getattr(args, name) < 1:
            raise BadRequest(f"--{name} {getattr(args, name)} must be at least 1", param=name)
    rows = parse_rows(args.rows or STANDARD)
    config = config_for(
        rows,
        args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        state_dtype=args.state_dtype,
        device=args.device,
        step_tokens=args.step_tokens,
        chunk_tokens=args.step_tokens,
        block_tokens=args.block_tokens,
        cache_bytes=args.cache_bytes,
        steps_in_flight=args.steps_in_flight,
        cuda_graphs=args.cuda_graphs,
    )
    bench = Bench(config, rows, args.rounds, args.steps, profile=args.profile > 0)

    def ready(rates: "Rates", footprint: "Footprint") -> None:
        for line in table.heading(config, rates, footprint):
            print(line, flush=True)

    results: list[Result] = []

    def write() -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(table.as_json(bench, results), indent=2) + "\n")

    def show(result: "Result") -> None:
        results.append(result)
        for line in table.row(result, args.profile):
            print(line, flush=True)
        write()  # a run that is cut short leaves what it has

    bench.run(show, ready)
    assert bench.memory is not None
    print(table.memory(bench.memory))
    write()
    return 0
