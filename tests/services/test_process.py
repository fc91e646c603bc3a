"""A front as a process: one ready line, a clean end by signal while loading and while serving, one-line errors."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio, sys
from services.decode.config import load
from services.decode.rpc import DecodeRole
from tests.services.fake_engine import FakeEngine
from twinflow.contracts.errors import ModelError
from twinflow.engine.front import run_front, run_process

class Engine(FakeEngine):
    async def start(self, config):
        print("loading", flush=True)
        await asyncio.sleep({"slow": 60}.get(how, 0))
        if how == "broken":
            raise ModelError("no weights for layer 3")
        if how == "dies":
            asyncio.get_running_loop().call_later(0.1, self.die)
        return await super().start(config)

    async def close(self):
        await super().close()
        print("engine closed", flush=True)

how = sys.argv[1]
run = lambda config: run_front(config, Engine(), lambda front: DecodeRole(front, config))
sys.exit(run_process("twinflow decode", lambda: load(["--model", "m", *sys.argv[2:]]), run))
"""


@pytest.fixture
def start() -> Iterator:
    processes: list[subprocess.Popen] = []

    def begin(*argv: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *argv], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen, text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came")


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_ready_then_stopped(start, sig: signal.Signals) -> None:
    process = start("fine", "--worker-id", "d0")
    line = wait_for(process, "ready:")
    for part in (
        "decode worker d0 at 127.0.0.1:",
        "model m",
        "fingerprint ffff",
        "2048 blocks of 512 B",
        "transport nixl",
    ):
        assert part in line
    process.send_signal(sig)
    rest, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "engine closed" in rest
    assert "stopped" in rest
    assert "Traceback" not in rest


def test_stopped_while_loading(start) -> None:
    process = start("slow")
    wait_for(process, "loading")
    begun = time.monotonic()
    process.terminate()
    rest, _ = process.communicate(timeout=10)
    assert (process.returncode, time.monotonic() - begun < 5) == (0, True)
    assert "ready:" not in rest


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("broken",), "twinflow decode: error: no weights for layer 3"),
        (("dies",), "twinflow decode: error: the engine process died"),
        (("fine", "--role", "chef"), "twinflow decode: error: --role: 'chef' is not prefill|decode|both"),
        (("fine", "--host", "203.0.113.1"), "twinflow decode: error: cannot listen on 203.0.113.1:0"),
    ],
    ids=["model", "engine", "setting", "port"],
)
def test_one_line_errors(start, argv: tuple[str, ...], message: str) -> None:
    output, _ = start(*argv).communicate(timeout=20)
    assert message in output
    assert "Traceback" not in output
