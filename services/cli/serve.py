"""`twinflow router | prefill | decode`: one service in this process. Its settings, `--help` included, are its own."""

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

SERVICES = {
    "router": "start a router: the OpenAI-compatible front and the scheduler",
    "prefill": "start a prefill worker: computes prompts for decode workers",
    "decode": "start a decode worker: generates, pulls prompts' KV and states from prefill workers",
}
PARENT_ENV = "TWINFLOW_PARENT_PID"  # set by `cluster`: end when this process does
PR_SET_PDEATHSIG = 1


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Names only, for `twinflow --help`; `main` hands these commands to `run` before argparse sees them."""
    for name, text in SERVICES.items():
        commands.add_parser(name, help=f"{text} (see twinflow {name} --help)", add_help=False)


def run(name: str, argv: Sequence[str]) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit code. Imports the one service that is asked for."""
    end_with_parent()
    if name == "router":
        from services.router.main import main
    elif name == "prefill":
        from services.prefill.main import main
    else:
        from services.decode.main import main
    sys.argv = [f"twinflow {name}", *argv]  # a service's main reads its own command line
    return main()


def end_with_parent() -> None:
    """Asks Linux for SIGTERM when the parent named in the environment ends, so that no worker outlives `twinflow up`."""
    parent = os.environ.pop(PARENT_ENV, "")
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before we asked
        raise SystemExit(1)
