"""`twinflow up`: a whole cluster on this machine in the foreground, until Ctrl-C. What ends meanwhile is started again.

A process that ends before the cluster has served at all ends the command: that is a mistake of the setup as a rule.
"""

import argparse
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.cli.cluster import Cluster, NotReady
from services.cli.console import Console, fail
from services.cli.process import ProcessDied
from services.cli.supervisor import STEADY_S, GivenUp, Supervisor
from services.cli.topology import ClusterSettings, add_options, plan, settings_from, with_model_here

WATCH_S = 0.2
RESTARTS = 5


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "up",
        allow_abbrev=False,
        help="start a cluster on this machine and keep it in the foreground",
        description="Starts one router and the given numbers of prefill and decode workers on this machine, waits until "
        "they serve, and stops them in order on Ctrl-C. A process that ends unasked once they serve is started again.",
    )
    add_options(parser)
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="also write each process's output to DIR/NAME.log")
    parser.add_argument(
        "--ready-timeout", type=float, default=600.0, metavar="S", help="give up after S seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--restarts", type=int, default=RESTARTS, metavar="N",
        help=f"stop the cluster when a process ends again after N restarts in a row without {STEADY_S:g} s of service "
        "between; 0 = at the first end (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = settings_from(args)
    console = Console()
    if args.log_dir:
        args.log_dir.mkdir(parents=True, exist_ok=True)
    made = plan(with_model_here(settings))
    cluster = Cluster(made, sink=console.process_line, log_dir=args.log_dir)
    with stop_signals() as stop, cluster:
        cluster.start_all()
        try:
            if cluster.wait_ready(args.ready_timeout, console.progress, stop.is_set):
                for line in welcome(settings, made.base_url):
                    console.line(line)
                console.line(f"  twinflow admin workers --router {made.admin}\n")
            supervisor = Supervisor(cluster, args.restarts, console.line)
            while not stop.wait(WATCH_S):
                supervisor.look()
        except (ProcessDied, NotReady, GivenUp) as e:
            code = 1
            last_words(e, console)
            fail(f"{e}; stopping the cluster")
        else:
            code = 0
            console.line("stopping ...")
        killed = cluster.stop()
    if killed:
        fail(f"had to kill {', '.join(killed)}")
    return code


def last_words(error: ProcessDied | NotReady | GivenUp, console: Console) -> None:
    """The last lines of the process that ended, together: while it ran, the others spoke in between."""
    died = error.died if isinstance(error, GivenUp) else error
    if isinstance(died, ProcessDied):
        console.line(f"the last lines of {died.name}:")
        for line in died.tail:
            console.process_line(died.name, line)


def welcome(settings: ClusterSettings, base_url: str) -> list[str]:
    n = settings
    workers = f"{n.prefill} prefill + {n.decode} decode" if n.prefill else f"{n.decode} aggregated"
    body = {"model": n.served_name, "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True}
    return [
        "",
        f"ready: {n.served_name} on {base_url}/v1 ({workers}); Ctrl-C stops it",
        "",
        f"  curl -N {base_url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"    -d '{json.dumps(body)}'",
        "",
    ]


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Set by SIGINT or SIGTERM; a second one ends the process at once (children follow their parent)."""
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
