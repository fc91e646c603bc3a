"""The supervisor of `twinflow up`, by a clock set by hand, over a cluster that only notes what it is told."""

import random
from dataclasses import dataclass, field

import pytest

from services.cli.process import ProcessDied
from services.cli.supervisor import FIRST_PAUSE_S, MAX_PAUSE_S, STEADY_S, GivenUp, Supervisor

RESTARTS = 5


@dataclass
class NotedCluster:
    now_s: float = 0.0
    ended: list[ProcessDied] = field(default_factory=list)
    up: set[str] = field(default_factory=set)
    calls: list[tuple[str, str]] = field(default_factory=list)

    def died(self) -> list[ProcessDied]:
        return list(self.ended)

    def kill(self, name: str) -> None:
        self.calls.append(("kill", name))
        self.ended = [d for d in self.ended if d.name != name]

    def start(self, name: str) -> None:
        self.calls.append(("start", name))

    def serving(self) -> set[str]:
        return set(self.up)

    def end(self, name: str, code: int = -6) -> None:
        self.ended.append(ProcessDied(name, code, (f"last words of {name}",)))
        self.up.discard(name)


@pytest.fixture
def cluster() -> NotedCluster:
    return NotedCluster()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(cluster: NotedCluster, said: list[str]) -> Supervisor:
    return Supervisor(cluster, RESTARTS, said.append, lambda: cluster.now_s)  # type: ignore[arg-type]


def run_for(supervisor: Supervisor, cluster: NotedCluster, seconds: float) -> None:
    until = cluster.now_s + seconds
    while cluster.now_s < until:
        supervisor.look()
        cluster.now_s += 0.1


def test_what_ended_is_cleared_away_and_starts_after_its_pause(
    supervisor: Supervisor, cluster: NotedCluster, said: list[str]
) -> None:
    cluster.end("prefill-0")
    supervisor.look()
    assert cluster.calls == [("kill", "prefill-0")]  # what is left of its group
    cluster.now_s += FIRST_PAUSE_S - 0.01
    supervisor.look()
    assert len(cluster.calls) == 1
    cluster.now_s += 0.02
    supervisor.look()
    supervisor.look()
    assert cluster.calls == [("kill", "prefill-0"), ("start", "prefill-0")]
    assert said == ["prefill-0 was killed by SIGABRT; it starts again in 0.5 s"]


def test_pauses_grow_and_the_row_ends(supervisor: Supervisor, cluster: NotedCluster) -> None:
    pauses = []
    for _ in range(RESTARTS):
        cluster.end("decode-0", 1)
        began_s = cluster.now_s
        while cluster.calls[-1:] != [("start", "decode-0")]:
            supervisor.look()
            cluster.now_s += 0.1
        pauses.append(cluster.now_s - began_s)
        cluster.calls.clear()
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0], abs=0.25)
    cluster.end("decode-0", 1)
    with pytest.raises(
        GivenUp, match=r"decode-0 exited with code 1; it has ended 6 times without 30 s of service"
    ) as e:
        supervisor.look()
    assert e.value.died.tail == ("last words of decode-0",)


def test_pauses_have_an_upper_bound(cluster: NotedCluster, said: list[str]) -> None:
    supervisor = Supervisor(cluster, 50, said.append, lambda: cluster.now_s)  # type: ignore[arg-type]
    for _ in range(50):
        cluster.end("decode-0")
        run_for(supervisor, cluster, MAX_PAUSE_S + 0.5)
    assert cluster.calls.count(("start", "decode-0")) == 50


def test_service_for_long_enough_begins_a_new_row(supervisor: Supervisor, cluster: NotedCluster) -> None:
    """However long it took to load: only what it serves counts. A worker that dies once an hour is never given up on."""
    for _ in range(3 * RESTARTS):
        cluster.end("decode-0")
        run_for(supervisor, cluster, 100.0)  # loads
        cluster.up.add("decode-0")
        run_for(supervisor, cluster, STEADY_S + 2.0)
    assert cluster.calls.count(("start", "decode-0")) == 3 * RESTARTS


def test_living_for_long_without_service_is_no_success(supervisor: Supervisor, cluster: NotedCluster) -> None:
    """It loads for minutes and dies of it, or flickers."""
    for _ in range(RESTARTS):
        cluster.end("decode-0")
        run_for(supervisor, cluster, 600.0)
        for _ in range(3):
            cluster.up.add("decode-0")
            run_for(supervisor, cluster, STEADY_S / 2)
            cluster.up.discard("decode-0")
            run_for(supervisor, cluster, 5.0)
    cluster.end("decode-0")
    with pytest.raises(GivenUp):
        supervisor.look()


def test_rows_are_each_process_s_own(supervisor: Supervisor, cluster: NotedCluster) -> None:
    names = [f"decode-{i}" for i in range(4)] + ["router"]
    for name in random.Random(1).sample(names * RESTARTS, RESTARTS * len(names)):
        cluster.end(name)
        run_for(supervisor, cluster, MAX_PAUSE_S)
    assert sorted(n for what, n in cluster.calls if what == "start") == sorted(names * RESTARTS)


def test_none_allowed_is_the_first_end(cluster: NotedCluster, said: list[str]) -> None:
    supervisor = Supervisor(cluster, 0, said.append, lambda: cluster.now_s)  # type: ignore[arg-type]
    cluster.end("router", 3)
    with pytest.raises(GivenUp, match=r"^router exited with code 3$"):
        supervisor.look()
    assert said == []
