"""A cluster of processes on this machine: start, wait until it serves, watch, stop in order. No torch, no asyncio.

with Cluster(specs, base_url) as cluster:      # stops everything on the way out
    cluster.start_all()
    cluster.wait_ready(timeout_s=60)
    cluster.kill("decode-0"); cluster.start("decode-0")
"""

import contextlib
import http.client
import json
import random
import signal
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from services.cli.process import LineSink, Process, ProcessDied, ProcessSpec

POLL_S = 0.1
PORTS = range(20_000, 30_000)  # below those that Linux gives to whoever connects, 32,768 and up
GRACE_S = 10.0  # per stage: a worker finishes its step and closes its engine within it


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Processes in the order of their start. `workers` are the names that the router must be connected to before the cluster
    counts as ready: /ready alone says only that some decode worker can serve."""

    specs: tuple[ProcessSpec, ...]
    base_url: str  # of the router's HTTP
    workers: tuple[str, ...] = ()
    admin: str = ""  # host:port of the router's gRPC


class NotReady(Exception):
    """The cluster did not become ready in time; the message carries what /ready said last."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that were free a moment ago, all different. A worker listens seconds later, so none is of those that the kernel gives
    to whoever connects meanwhile. Raises OSError where none is found."""
    sockets: list[socket.socket] = []
    try:
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            if len(sockets) == count:
                break
            with contextlib.suppress(OSError):  # taken
                sockets.append(socket.create_server((host, port)))
        if len(sockets) < count:
            raise OSError(f"{host} has {len(sockets)} free ports from {PORTS[0]} to {PORTS[-1]}, {count} are needed")
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def get_json(base_url: str, path: str, timeout_s: float = 2.0) -> tuple[int, Any]:
    """(status, parsed body; text where it is no JSON). Raises OSError or HTTPException when nothing answers."""
    url = urllib.parse.urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
        try:
            return response.status, json.loads(body)
        except ValueError:
            return response.status, body.strip()
    finally:
        connection.close()


class Cluster:
    """Owns its processes. They are started in the plan's order and stopped stage by stage: `stages` lists name prefixes, the
    ones that take requests first. Children that end unasked raise `ProcessDied` from `check` and `wait_ready`."""

    def __init__(
        self,
        plan: ClusterPlan,
        *,
        sink: LineSink | None = None,
        log_dir: Path | None = None,
        stages: Sequence[str] = ("router", "decode", "prefill"),
    ) -> None:
        self.specs = {s.name: s for s in plan.specs}
        self.base_url = plan.base_url
        self._workers = plan.workers
        self._sink: LineSink = sink or (lambda name, line: None)
        self._log_dir = log_dir
        self._stages = stages
        self._processes: dict[str, Process] = {}

    @property
    def names(self) -> list[str]:
        return list(self.specs)

    @property
    def running(self) -> list[Process]:
        return [p for p in self._processes.values() if p.returncode is None]

    def process(self, name: str) -> Process:
        """Raises KeyError if it was never started."""
        return self._processes[name]

    def start(self, name: str) -> Process:
        """Starts one process, again after it ended. Raises ValueError while it still runs."""
        old = self._processes.get(name)
        if old is not None and old.returncode is None:
            raise ValueError(f"{name} is already running (pid {old.pid})")
        if old is not None:
            old.kill_group()  # an engine that outlived its front
        log_file = self._log_dir / f"{name}.log" if self._log_dir else None
        process = Process(self.specs[name], self._sink, log_file)
        self._processes[name] = process
        return process

    def start_all(self) -> None:
        for name in self.specs:
            self.start(name)

    def signal(self, name: str, sig: signal.Signals) -> None:
        """Any signal, e.g. SIGSTOP; the process stays in the cluster."""
        self.process(name).send(sig)

    def kill(self, name: str) -> None:
        """SIGKILL to a process and all it started, as a lost machine looks to the others."""
        self.process(name).kill_group()

    def died(self) -> list[ProcessDied]:
        """The reports of all children that ended unasked and were not started again or killed since."""
        reports = (process.died() for process in self._processes.values())
        return [report for report in reports if report is not None]

    def check(self) -> None:
        """Raises ProcessDied for the first child that ended unasked."""
        for report in self.died():
            raise report

    def serving(self) -> set[str]:
        """The router if it answers, and the workers that it is connected to."""
        try:
            return {"router", *connected(get_json(self.base_url, "/health")[1])}
        except (OSError, http.client.HTTPException):
            return set()

    def wait_ready(
        self,
        timeout_s: float,
        on_wait: Callable[[float, str], None] = lambda seconds, status: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Waits until GET /ready answers 200 and the router is connected to all workers of the plan, calling `on_wait`
        (seconds so far, what is missing) at every poll. False when `stop()` turned true first. Raises ProcessDied when a
        child ends, NotReady after `timeout_s`."""
        started = time.monotonic()
        missing = "the router to listen"
        while not stop():
            self.check()
            with contextlib.suppress(OSError, http.client.HTTPException):  # the router does not listen yet
                missing = self._missing()
            if not missing:
                return True
            seconds = time.monotonic() - started
            if seconds > timeout_s:
                raise NotReady(f"not ready after {timeout_s:.0f} s, still waiting for {missing}")
            on_wait(seconds, f"waiting for {missing}")
            time.sleep(POLL_S)
        return False

    def _missing(self) -> str:
        """What the cluster lacks to be ready; empty when nothing. Raises as `get_json`."""
        if self._workers:
            here = connected(get_json(self.base_url, "/health")[1])
            missing = [name for name in self._workers if name not in here]
            if missing:
                return ", ".join(missing)
        code, body = get_json(self.base_url, "/ready")
        return "" if code == 200 else f"the router ({summary(body)})"

    def stop(self, grace_s: float = GRACE_S) -> list[str]:
        """Ends everything, stage by stage. Returns the names that had to be killed. Idempotent."""
        killed: list[str] = []
        for stage in [*self._stages, ""]:
            members = [p for p in self.running if p.name.startswith(stage)]
            killed += stop_together(members, grace_s)
        for process in self._processes.values():
            process.kill_group()
        return killed

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def stop_together(processes: Iterable[Process], grace_s: float) -> list[str]:
    """SIGTERM to all, then one shared grace. Returns the names that did not end within it."""
    members = list(processes)
    for process in members:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    return [p.name for p in members if not p.wait(deadline - time.monotonic())]


def connected(health: Any) -> set[str]:
    """The workers that a router has sessions with, of what its /health answered."""
    return {w["id"] for w in health["workers"] if w["connected"]}


def summary(body: Any) -> str:
    """One line of what /ready answered."""
    if isinstance(body, dict):
        for key in ("message", "reason", "error", "detail", "status"):
            value = body.get(key)
            if isinstance(value, dict):
                return summary(value)
            if value:
                return str(value)
    return " ".join(str(body).split())[:160]


__all__ = ["Cluster", "ClusterPlan", "NotReady", "ProcessDied", "ProcessSpec", "free_ports", "get_json"]
