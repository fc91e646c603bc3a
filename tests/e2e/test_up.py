"""`twinflow up` as a person starts it, and its workers dying under it: killed by somebody, ended by their transport.

Real NIXL over TCP, where a read needs both sides.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from services.cli.cluster import Cluster, ClusterPlan, ProcessSpec, free_ports
from services.cli.memory import tree
from tests.chaos.engines import command_of, engine_of
from tests.chaos.quiet import pinned
from tests.e2e.conftest import MODEL, READY_S

NAMES = ("prefill-0", "decode-0", "decode-1")
PROMPT = "Once upon a time there lived at the edge of a great forest an old clockmaker and his granddaughter. " * 14
OPTIONS = (  # small chunks and no local prompts: whatever is asked, a hand-off begins it
    "--dtype=float32", "--verify=checksum", "--prefill=1", "--decode=2",
    "--set=prefill:engine.chunk-tokens=64", "--set=decode:local-max-tokens=0", "--set=router:local-max-tokens=0",
    "--set=decode:engine.doomed-limit-s=0.5", "--set=decode:engine.generation-drain-s=0.5",
)  # fmt: skip


@dataclass
class Up:
    """A running `twinflow up`, its lines, and its processes as the system knows them."""

    cluster: Cluster
    lines: list[str]

    @property
    def pid(self) -> int:
        return self.cluster.process("up").pid

    def worker(self, name: str) -> tuple[int, str]:
        """(pid of its front, its gRPC address). Raises AssertionError while it does not run."""
        for pid in tree(self.pid)[1:]:
            options = dict(a[2:].split("=", 1) for a in command_of(pid) if a.startswith("--") and "=" in a)
            if options.get("worker-id") == name:
                return pid, f"127.0.0.1:{options['port']}"
        raise AssertionError(f"{name} does not run")

    def router(self) -> int:
        return next(pid for pid in tree(self.pid)[1:] if command_of(pid)[3:4] == ["router"])

    def engine(self, name: str) -> int:
        """Of the worker's two processes the one with the model and the transport."""
        return engine_of(self.worker(name)[0])

    def incarnations(self, name: str) -> list[str]:
        """As they joined the router."""
        said = [x.rpartition("incarnation ")[2] for x in self.lines if f"worker {name} (" in x and " joined," in x]
        return [x.strip() for x in said]

    def says(self, text: str) -> bool:
        return any(text in x for x in self.lines)

    def all_serve(self) -> bool:
        return set(NAMES) <= self.cluster.serving()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    (port,) = free_ports(1)
    command = (sys.executable, "-m", "services.cli", "up", "--model", MODEL, f"--port={port}", *OPTIONS)
    spec = ProcessSpec("up", command, {"OMP_NUM_THREADS": "1", "UCX_TLS": "tcp"})
    lines: list[str] = []
    plan = ClusterPlan((spec,), f"http://127.0.0.1:{port}", NAMES)
    folder = tmp_path_factory.mktemp("up")
    with Cluster(plan, sink=lambda _, line: lines.append(line), log_dir=folder, stages=("up",)) as cluster:
        cluster.start_all()
        cluster.wait_ready(READY_S)
        yield Up(cluster, lines)


def body(salt: str, tokens: int) -> dict[str, object]:
    asked = {"model": Path(MODEL).name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**asked, "repetition_penalty": 1.0, "cache_salt": salt}


def ask(up: Up, salt: str, tokens: int = 8) -> tuple[str, dict[str, object]]:
    """(greedy text, statistics)."""
    reply = httpx.post(
        f"{up.cluster.base_url}/v1/completions", json=body(salt, tokens), headers={"x-twinflow-stats": "1"}, timeout=60
    )
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"], reply.json()["twinflow"]


@pytest.mark.timeout(300)
def test_a_killed_worker_comes_back_while_its_client_goes_on(up: Up) -> None:
    """The stream continues at the other decode worker with the same tokens; the killed one serves again as another incarnation,
    and its engine, which outlived it, is gone."""
    expected, _ = ask(up, "whole", 200)
    text = ""
    with httpx.stream(
        "POST", f"{up.cluster.base_url}/v1/completions", json=body("whole", 200) | {"stream": True}, timeout=60
    ) as reply:
        victim = reply.headers["x-twinflow-decode-worker"]
        front, engine = up.worker(victim)[0], up.engine(victim)
        for event in reply.iter_lines():
            if event.startswith("data: {"):
                text += json.loads(event.removeprefix("data: "))["choices"][0]["text"]
                if len(text) > 40 and alive(front):
                    os.kill(front, signal.SIGKILL)
    assert text == expected
    assert not alive(front)
    assert wait_until(lambda: up.says(f"{victim} was killed by SIGKILL; it starts again in 0.5 s"), 5)
    assert wait_until(lambda: not alive(engine), 5)
    assert wait_until(up.all_serve, READY_S)
    first, second = up.incarnations(victim)
    assert first != second
    assert ask(up, "afterwards", 200)[0] == expected


@pytest.mark.timeout(300)
def test_a_worker_that_its_transport_ended_takes_hand_offs_again(up: Up) -> None:
    """A prefill worker is stopped amid a read, its reader gives up and destroys the agent that read; when the worker goes on, UCX
    finds that reader gone and aborts the engine ("Endpoint timeout"). Where it does not, the engine gets the same signal."""
    expected, stats = ask(up, "before")
    assert (stats["route"], stats["prefill_worker"]) == ("remote", "prefill-0")
    front, engine = up.worker("prefill-0")[0], up.engine("prefill-0")
    readers = [up.worker(name)[1] for name in NAMES[1:]]
    assert catch_read(up, (front, engine), readers)
    assert wait_until(lambda: up.says("transfer generation 1 is closed"), 30)
    for pid in (front, engine):
        os.kill(pid, signal.SIGCONT)
    by_itself = wait_until(lambda: not alive(engine), 10)
    print(f"ended by its transport: {by_itself}")
    if not by_itself:
        os.kill(engine, signal.SIGABRT)
    assert wait_until(lambda: up.says("prefill-0 exited with code 1; it starts again"), 10)
    assert wait_until(up.all_serve, READY_S)
    first, *_, last = up.incarnations("prefill-0")
    assert first != last
    again, stats = ask(up, "after")
    assert (again, stats["route"], stats["prefill_worker"]) == (expected, "remote", "prefill-0")


@pytest.mark.timeout(200)
def test_a_killed_router_comes_back_on_its_port(up: Up) -> None:
    """Workers find it by themselves, and are not started again."""
    expected, _ = ask(up, "router")
    workers = [up.worker(name)[0] for name in NAMES]
    os.kill(up.router(), signal.SIGKILL)
    assert wait_until(lambda: up.says("router was killed by SIGKILL; it starts again"), 5)
    assert wait_until(up.all_serve, READY_S)
    assert ask(up, "router")[0] == expected
    assert [up.worker(name)[0] for name in NAMES] == workers


def catch_read(up: Up, pids: tuple[int, int], readers: list[str]) -> bool:
    """Stops the worker for a moment again and again while prompts go through it, until a read stays posted; then it stays
    stopped. (A read takes milliseconds.)"""
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, up, f"caught-{i}", 1) for i in range(60)]
        try:
            while not all(a.done() for a in asked):
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(0.05)
                if any(map(pinned, readers)) and not wait_until(lambda: not any(map(pinned, readers)), 0.5):
                    return True
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
                time.sleep(0.02)
        finally:
            for a in asked:
                a.cancel()
    return False


def test_an_interrupt_ends_all_of_it(up: Up) -> None:
    """Last in this file."""
    below = tree(up.pid)[1:]
    assert len(below) >= 1 + 2 * len(NAMES)
    up.cluster.signal("up", signal.SIGINT)
    assert wait_until(lambda: up.cluster.process("up").returncode is not None, 30)
    assert up.cluster.process("up").returncode == 0
    assert not any(map(alive, below))
