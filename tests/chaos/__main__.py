"""`make chaos`: a long run, its table, exit code 1 if anything was found that must not be.

python -m tests.chaos --faults 200 --seed 1 --table docs/chaos.md     replaces what stands between the marks in that file

The table is written after every twenty faults and where the run is interrupted (SIGINT, SIGTERM), of what ran so far.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.chaos.load import questions
from tests.chaos.network import Network
from tests.chaos.report import Report
from tests.chaos.runner import run
from tests.chaos.schedule import DECK, SLOWED, UNPLUGGED, WORKERS, schedule
from tests.e2e.oracle import Oracle

BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def main() -> int:
    args = options().parse_args()
    if args.transport:
        os.environ["UCX_TLS"] = args.transport
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell in the background ignores it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    network = Network.create(WORKERS)
    try:
        return long_run(args, network)
    finally:
        if isinstance(network, Network):
            network.close()


def long_run(args: argparse.Namespace, network: Network | str) -> int:
    hosts, deck = (network, (*DECK, *UNPLUGGED)) if isinstance(network, Network) else (None, DECK)
    if isinstance(network, str):
        print(f"no cables are pulled: {network}")
    elif network.can_be_slow():
        deck += SLOWED
    else:
        print("no cable is slow: tc has no token bucket filter here")
    faults = schedule(args.seed, args.faults, deck=deck)
    known = questions(Oracle(args.model), args.seed, 12, prompt_tokens=448, new_tokens=32)
    report = Report(args.seed)
    with tempfile.TemporaryDirectory(prefix="twinflow-chaos-") as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        work = run(
            faults, known, report, model=args.model, log_dir=logs, say=lambda text: print(text, flush=True),
            after_round=lambda: progress(report, args), network=hosts,
        )  # fmt: skip
        try:
            asyncio.run(work)
        except KeyboardInterrupt:
            print(f"interrupted after {len(report.happened)} of {args.faults} faults")
            show(report, args)
            return 130
    return show(report, args)


def table(report: Report, args: argparse.Namespace) -> list[str]:
    of = "" if len(report.happened) == args.faults else f" of {args.faults}"
    how = f"{len(report.happened)}{of} faults, seed {report.seed}, UCX_TLS={args.transport or 'default'}, "
    lines = [f"{how}{report.seconds / 60:.0f} minutes.", "", *report.lines()]
    if args.table:
        text = args.table.read_text()
        before, rest = text.split(BEGIN)
        args.table.write_text("\n".join([before + BEGIN, "", *lines, "", END + rest.split(END)[1]]))
    return lines


def progress(report: Report, args: argparse.Namespace) -> None:
    """After every round: one line, and the table of what ran so far."""
    table(report, args)
    for defect in report.defects()[-3:]:
        print(f"so far: {defect}")
    print(
        f"{len(report.happened)} of {args.faults} faults, {len(report.exchanges)} requests, {len(report.defects())} defects, "
        f"{report.seconds / 60:.1f} minutes",
        flush=True,
    )


def show(report: Report, args: argparse.Namespace) -> int:
    print("\n" + "\n".join(table(report, args)))
    defects = report.defects()
    for defect in defects:
        print(f"FOUND: {defect}")
    for (code, message), times in Counter((e.error, e.message) for e in report.exchanges if e.error).items():
        print(f"error, {times} times: {code}: {message}")
    for happened in report.slow:
        print(
            f"slow: {happened.fault}: noticed after {happened.noticed_s:.1f} s, went on after {happened.went_on_s:.1f} s"
        )
    for exit in report.aborts:
        print(f"ended by its transport: {exit.name} with {exit.code}: {' | '.join(exit.tail[-3:])}")
    return 1 if defects else 0


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="models/twinflow-tiny")
    parser.add_argument(
        "--transport", default="tcp", help="UCX_TLS of the workers; empty = UCX chooses (shared memory)"
    )
    parser.add_argument("--table", type=Path, help="a Markdown file with the marks that enclose the table")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
