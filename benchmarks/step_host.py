"""What the host costs a decode step: how long the GPU stands idle between steps, and where the host's own time goes.

    python3 -m benchmarks.step_host --model MODEL|config.json [--load-format dummy] [--batch 256] [--context 1024]

An engine decodes `--batch` sequences, turn by turn, and sends every report through a pipe to a second process, as a worker's
engine does. That process reads the reports and keeps 5 % of a core busy besides (`--front`). As in a worker, Python's garbage
collector leaves alone what was there before the first request.

    idle     wall time of a step less the time in which some kernel ran (from a profile of further steps): what the host
             costs on the critical path
    host     a turn without its wait for the GPU: commands, scheduling, launching, landing, report
    launch, land, send    parts of it: the runner's launch and landing (after the step's event), the report through the pipe
    rest    what is left of it: commands, admission, growth, planning, reporting
    gc      garbage collection, wherever it struck
    longest    the host's part of the longest turn: the GPU waits for it as far as it exceeds a step
"""

import argparse
import gc
import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from services.cli.bench_table import device_name
from twinflow.bench.drive import Driver
from twinflow.bench.profile import profiled
from twinflow.bench.rows import Row
from twinflow.bench.run import config_for
from twinflow.engine.build import build_engine
from twinflow.engine.core import Engine

PERIOD_S = 0.01  # of the front's work
PARTS = ("wait", "launch", "land", "send")


class Watched:
    """An engine whose turns are timed; what `Driver` needs of one. `spent` collects seconds of each part."""

    def __init__(self, engine: Engine, pipe: Connection) -> None:
        self.ready = engine.ready
        self._engine, self._pipe = engine, pipe
        self.reset()
        runner: Any = engine.runner
        runner.launch = self._timed("launch", runner.launch)
        land = self._timed("land", runner.land)

        def wait_and_land(flight: Any) -> Any:
            if flight.event is not None:
                self._timed("wait", flight.event.synchronize)()
            return land(flight)

        runner.land = wait_and_land
        gc.callbacks.append(self._collecting)

    def reset(self) -> None:
        self.spent = dict.fromkeys((*PARTS, "turn", "gc"), 0.0)
        self.turns = 0
        self.longest_s = 0.0

    def turn(self, commands: Any) -> Any:
        waited, began = self.spent["wait"], time.perf_counter()
        report = self._engine.turn(commands)
        if report is not None:
            self._timed("send", self._pipe.send)(report)
        taken = time.perf_counter() - began
        self.spent["turn"] += taken
        self.longest_s = max(self.longest_s, taken - (self.spent["wait"] - waited))
        self.turns += 1
        return report

    def close(self) -> None:
        gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, _: dict[str, int]) -> None:
        self.spent["gc"] += time.perf_counter() * (1 if phase == "stop" else -1)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.spent[part] += time.perf_counter() - began

        return timed


def front(pipe: Connection, share: float) -> None:
    """The other process: takes reports in as they come and computes for `share` of the time. Ends with the pipe."""
    due = time.monotonic()
    try:
        while True:
            while pipe.poll(max(0.0, due - time.monotonic())):
                pipe.recv()
            busy_until = time.monotonic() + share * PERIOD_S
            while time.monotonic() < busy_until:
                json.dumps({"id": "chat", "choices": [{"delta": {"content": "word"}}]})
            due += PERIOD_S
    except EOFError:
        return


def measure(args: argparse.Namespace, pipe: Connection) -> dict[str, Any]:
    row = Row("decode", args.batch, args.context)
    config = config_for(
        (row,),
        args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        device=args.device,
        step_tokens=args.step_tokens,
        chunk_tokens=args.step_tokens,
    )
    engine, _ = build_engine(config, lambda _: None, None)
    gc.freeze()  # as `twinflow.engine.child` does
    watched = Watched(engine, pipe)
    driver = Driver(watched)  # type: ignore[arg-type]
    found: dict[str, Any] = {"device": device_name(args.device), "batch": args.batch, "context": args.context}

    def look() -> None:
        watched.reset()
        began = time.perf_counter()
        driver.step(args.steps, args.batch)
        wall = time.perf_counter() - began
        longest_s, turns = watched.longest_s, watched.turns
        spent = {part: seconds / turns for part, seconds in watched.spent.items()}
        profile = profiled(lambda: driver.step(args.steps, args.batch), args.device, args.steps)
        found.update({f"{part}_s": spent[part] for part in PARTS})
        found["host_s"] = spent["turn"] - spent["wait"]
        found["rest_s"] = spent["turn"] - sum(spent[part] for part in PARTS)
        found["gc_s"], found["longest_s"] = spent["gc"], longest_s
        found["wall_s"] = wall / args.steps
        found["busy_s"] = profile.busy_s
        found["idle_s"] = wall / args.steps - profile.busy_s

    driver.decode(row, 1, args.steps, look)
    watched.close()
    engine.close()
    gc.unfreeze()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, or with --load-format dummy a config.json")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=16384)
    parser.add_argument("--front", type=float, default=0.05, help="share of a core that the other process takes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=front, args=(theirs, args.front), daemon=True)
    other.start()
    theirs.close()
    found = measure(args, ours)
    ours.close()
    other.join()
    print(
        f"{found['device']}, torch {torch.__version__}: decode step of {args.batch} sequences at {args.context} tokens"
    )
    for name in ("wall", "busy", "idle", "host", *PARTS, "rest", "gc", "longest"):
        print(f"  {name:<7} {1e3 * found[f'{name}_s']:8.3f} ms")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
