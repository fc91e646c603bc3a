"""`up` and `demo` from start to exit code, against stub processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services.cli import demo, supervisor, up
from services.cli.cluster import ClusterPlan, free_ports
from services.cli.main import main
from services.cli.process import ProcessDied, ProcessSpec
from services.cli.topology import ClusterSettings

HERE = Path(__file__).parent


def stub_plan(*options: str, worker: tuple[str, ...] = (), script: str = "openai_stub.py") -> ClusterPlan:
    port = free_ports(1)[0]
    router = ProcessSpec("router", (sys.executable, str(HERE / script), str(port), *options))
    argv = (sys.executable, str(HERE / "stub.py"), "decode-0", "0", "0", os.devnull, *worker)
    return ClusterPlan((router, ProcessSpec("decode-0", argv)), f"http://127.0.0.1:{port}")


def install(monkeypatch: pytest.MonkeyPatch, made: ClusterPlan) -> None:
    def plan(settings: ClusterSettings) -> ClusterPlan:
        return made

    for module in (up, demo):
        monkeypatch.setattr(module, "plan", plan)
        monkeypatch.setattr(module, "with_model_here", lambda settings: settings)


def test_demo_prints_answers_and_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, stub_plan())
    assert main(["demo", "--ready-timeout", "20"]) == 0
    out = capsys.readouterr().out
    assert out.count("Hello world") == 4
    assert out.count("  remote  ") == 4
    assert "memory of the whole cluster: 0." in out
    assert "stopped; the demo took" in out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("error", "request '1 long prompt' failed: "),
        ("no-text", "was answered with no text"),
        ("no-stats", "came without the statistics"),
    ],
)
def test_demo_fails_clearly(
    option: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, stub_plan(option))
    assert main(["demo", "--ready-timeout", "20"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["demo"], ["up", "--model", "org/m"]], ids=lambda c: c[0])
def test_a_worker_that_dies_before_the_cluster_serves_ends_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made = stub_plan(worker=("exit=7", "after=0.3"))
    install(monkeypatch, ClusterPlan(made.specs[1:], made.base_url))
    assert main([*command, "--ready-timeout", "20"]) == 1
    seen = capfd.readouterr()
    assert "decode-0 exited with code 7" in seen.err
    assert "decode-0   | something broke" in seen.out


def test_up_gives_up_on_a_worker_that_does_not_stay(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.05)
    install(monkeypatch, stub_plan(worker=("exit=7", "after=0.3")))
    assert main(["up", "--model", "org/m", "--ready-timeout", "20", "--restarts", "2"]) == 1
    seen = capfd.readouterr()
    assert "twinflow: error: decode-0 exited with code 7; it has ended 3 times" in seen.err
    assert [s for s in ("0.05", "0.1", "0.2") if f"code 7; it starts again in {s} s" in seen.out] == ["0.05", "0.1"]
    assert "the last lines of decode-0:" in seen.out
    assert seen.out.count("decode-0   | something broke") == 4  # as it came, three times, and once more in the end


def assert_nobody_starts_again(out: str) -> None:
    """After the stop there may be lines that processes had written before, and nothing of the supervisor."""
    _, stopping, after = out.partition("stopping ...\n")
    assert stopping
    assert all("|" in line for line in after.splitlines()), after


def test_up_stops_on_sigint_while_a_worker_waits_for_its_new_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, stub_plan(worker=("exit=7", "after=0.3")))
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 60.0)

    class Interrupting(supervisor.Supervisor):
        def _on_end(self, died: ProcessDied) -> None:
            super()._on_end(died)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(up, "Supervisor", Interrupting)
    assert main(["up", "--model", "org/m", "--ready-timeout", "20"]) == 0
    assert_nobody_starts_again(capfd.readouterr().out)


def test_up_stops_on_sigint_and_shows_how_to_call_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install(monkeypatch, stub_plan())
    log = tmp_path / "logs" / "decode-0.log"
    show = up.welcome

    def interrupt() -> None:
        while not (log.exists() and log.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    def welcome(settings: ClusterSettings, base_url: str) -> list[str]:
        threading.Thread(target=interrupt).start()
        return show(settings, base_url)

    monkeypatch.setattr(up, "welcome", welcome)
    assert main(["up", "--model", "org/m", "--log-dir", str(log.parent)]) == 0
    out = capsys.readouterr().out
    assert "ready: m on http://127.0.0.1:" in out
    assert "curl -N http://127.0.0.1:" in out
    assert_nobody_starts_again(out)
    assert log.read_text().endswith("hello from decode-0\n")


def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """`end_with_parent` in a child whose parent gets SIGKILL and so cannot stop anything."""
    child = (
        "import time; from services.cli.serve import end_with_parent; end_with_parent(); print('up', flush=True); "
        "time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys, time; from services.cli.serve import PARENT_ENV\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], env={{**os.environ, PARENT_ENV: str(os.getpid())}},"
        " stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 10
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rsplit(") ", 1)[1][0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().rsplit(") ", 1)[1][0] == "Z"
