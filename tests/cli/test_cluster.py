"""The cluster helper against stub processes: readiness, a child's death, the order of stopping."""

import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli import cluster as cluster_module
from services.cli.cluster import Cluster, ClusterPlan, NotReady, free_ports, get_json, stop_together, summary
from services.cli.memory import memory_bytes
from services.cli.process import Process, ProcessDied, ProcessSpec

STUB = str(Path(__file__).with_name("stub.py"))
TIMEOUT_S = 20.0


class Stubs:
    def __init__(self, folder: Path) -> None:
        self.endings = folder / "endings"
        self.port = free_ports(1)[0]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.lines: list[tuple[str, str]] = []
        self.clusters: list[Cluster] = []
        self.folder = folder

    def spec(self, name: str, *options: str, ready_after_s: float = 0.0) -> ProcessSpec:
        port = self.port if name.startswith("router") else 0
        return ProcessSpec(
            name, (sys.executable, STUB, name, str(port), str(ready_after_s), str(self.endings), *options)
        )

    def cluster(self, *specs: ProcessSpec, workers: tuple[str, ...] = ()) -> Cluster:
        made = Cluster(
            ClusterPlan(specs, self.base_url, workers), sink=lambda *line: self.lines.append(line), log_dir=self.folder
        )
        self.clusters.append(made)
        return made

    def wait_lines(self, count: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.lines) < count and time.monotonic() < deadline:
            time.sleep(0.02)


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[Stubs]:
    made = Stubs(tmp_path)
    yield made
    for cluster in made.clusters:
        cluster.stop(grace_s=0.0)


def test_waits_until_ready_and_tells_why_not_yet(stubs: Stubs) -> None:
    cluster = stubs.cluster(stubs.spec("router", ready_after_s=1.5))
    cluster.start_all()
    seen: list[str] = []
    assert cluster.wait_ready(TIMEOUT_S, lambda seconds, status: seen.append(status))
    assert "waiting for the router (warming up)" in seen
    assert get_json(stubs.base_url, "/ready")[0] == 200


def test_not_ready_in_time_says_what_was_missing(stubs: Stubs) -> None:
    cluster = stubs.cluster(stubs.spec("router", ready_after_s=1000.0))
    cluster.start_all()
    stubs.wait_lines(1)
    with pytest.raises(NotReady, match="not ready after 1 s, still waiting for the router"):
        cluster.wait_ready(1.0)


def test_waits_for_every_worker_of_the_plan(stubs: Stubs) -> None:
    cluster = stubs.cluster(stubs.spec("router"), workers=("decode-0", "prefill-0"))
    cluster.start_all()
    stubs.wait_lines(1)
    seen: list[str] = []
    with pytest.raises(NotReady, match="still waiting for prefill-0"):  # the stub's /health knows decode-0 alone
        cluster.wait_ready(1.0, lambda seconds, status: seen.append(status))
    assert seen[-1] == "waiting for prefill-0"


def test_wait_ends_when_asked_to_stop(stubs: Stubs) -> None:
    cluster = stubs.cluster(stubs.spec("router", ready_after_s=1000.0))
    cluster.start_all()
    assert not cluster.wait_ready(TIMEOUT_S, stop=lambda: True)


def test_a_dying_child_is_named_with_its_code_and_last_words(stubs: Stubs) -> None:
    cluster = stubs.cluster(stubs.spec("router", ready_after_s=1000.0), stubs.spec("decode-0", "exit=3", "after=0.3"))
    cluster.start_all()
    with pytest.raises(ProcessDied, match="decode-0 exited with code 3") as caught:
        cluster.wait_ready(TIMEOUT_S)
    assert caught.value.tail == ("hello from decode-0", "something broke")


def test_a_killed_child_is_named_with_its_signal(stubs: Stubs) -> None:
    cluster = stubs.cluster(stubs.spec("prefill-0"))
    process = cluster.start("prefill-0")
    process._popen.kill()  # by somebody else
    process._popen.wait()
    with pytest.raises(ProcessDied, match="prefill-0 was killed by SIGKILL"):
        cluster.check()


def test_stops_stage_by_stage_router_first(stubs: Stubs) -> None:
    names = ["prefill-0", "decode-0", "router", "decode-1"]
    cluster = stubs.cluster(*(stubs.spec(n) for n in names))
    cluster.start_all()
    stubs.wait_lines(len(names))
    assert cluster.stop() == []
    endings = stubs.endings.read_text().split()
    assert endings[0] == "router"
    assert sorted(endings[1:3]) == ["decode-0", "decode-1"]
    assert endings[3] == "prefill-0"
    assert cluster.running == []
    cluster.check()  # an end that was asked for is no death


def test_who_ignores_sigterm_is_killed_after_the_grace(stubs: Stubs) -> None:
    cluster = stubs.cluster(stubs.spec("router"), stubs.spec("decode-0", "stubborn"))
    cluster.start_all()
    stubs.wait_lines(2)
    assert cluster.stop(grace_s=0.5) == ["decode-0"]
    assert cluster.process("decode-0").returncode == -signal.SIGKILL


def test_kill_and_restart_one(stubs: Stubs) -> None:
    cluster = stubs.cluster(stubs.spec("router"), stubs.spec("decode-0"))
    cluster.start_all()
    first = cluster.process("decode-0").pid
    with pytest.raises(ValueError, match="decode-0 is already running"):
        cluster.start("decode-0")
    cluster.kill("decode-0")
    cluster.check()
    assert cluster.start("decode-0").pid != first
    assert [p.name for p in cluster.running] == ["router", "decode-0"]


def test_output_reaches_the_sink_and_a_log_file_per_process(stubs: Stubs) -> None:
    cluster = stubs.cluster(stubs.spec("router"), stubs.spec("decode-0"))
    cluster.start_all()
    stubs.wait_lines(2)
    cluster.stop()
    assert sorted(stubs.lines) == [("decode-0", "hello from decode-0"), ("router", "hello from router")]
    assert (stubs.folder / "decode-0.log").read_text().endswith("hello from decode-0\n")


def test_a_grandchild_does_not_outlive_the_group(stubs: Stubs) -> None:
    code = "import subprocess as s, sys, time; p = s.Popen(['sleep', '100']); print(p.pid, flush=True); time.sleep(100)"
    cluster = stubs.cluster(ProcessSpec("decode-0", (sys.executable, "-c", code)))
    cluster.start_all()
    stubs.wait_lines(1)
    pid = int(stubs.lines[0][1])
    assert memory_bytes([cluster.process("decode-0").pid]) > memory_bytes([pid]) > 0
    cluster.kill("decode-0")
    deadline = time.monotonic() + TIMEOUT_S
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Running, not a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def test_stop_together_shares_one_grace(stubs: Stubs) -> None:
    processes = [
        Process(stubs.spec(f"decode-{i}", "stubborn"), lambda *line: stubs.lines.append(line)) for i in range(3)
    ]
    stubs.wait_lines(3)
    started = time.monotonic()
    assert len(stop_together(processes, grace_s=1.0)) == 3
    assert time.monotonic() - started < 3 * 1.0


def test_free_ports_differ() -> None:
    assert len(set(free_ports(16))) == 16


def test_free_ports_are_none_that_somebody_who_connects_gets() -> None:
    """A worker listens seconds after its port was chosen; connections of others took it meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = [socket.create_connection(server.getsockname()) for _ in range(50)]
        lowest = min(s.getsockname()[1] for s in (server, *given))
        for s in given:
            s.close()
    assert max(free_ports(200)) < lowest


def test_a_taken_port_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(cluster_module, "PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match=f"0 free ports from {taken} to {taken}, 1 are needed"):
            free_ports(1)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"error": {"message": "no decode worker"}}, "no decode worker"),
        ({"status": "waiting"}, "waiting"),
        ("plain\n text", "plain text"),
        ({"ready": False}, "{'ready': False}"),
    ],
    ids=["openai-error", "status", "text", "unknown"],
)
def test_summary_of_ready(body: object, line: str) -> None:
    assert summary(body) == line
