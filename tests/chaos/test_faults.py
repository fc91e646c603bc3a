"""Real processes, a few faults from a fixed seed. The long run is `make chaos`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.load import questions
from tests.chaos.network import Network
from tests.chaos.report import Report
from tests.chaos.runner import run
from tests.chaos.schedule import Fault, Kind, Point, schedule
from tests.e2e.conftest import MODEL
from tests.e2e.oracle import Oracle

SEED = 15060  # decode-1 dies amid an answer, a link is cut before a first token, prefill-0 pauses amid a read
UNPLUG = Fault(Kind.UNPLUG, ("prefill-0",), Point.READING, delay_s=0.0, lasts_s=4.5, rest_s=1.0)
DECK = ((Kind.KILL, ("decode",)), (Kind.PAUSE, ("prefill",)), (Kind.CUT, ("decode", "prefill")))
WORKERS = ("prefill-0", "decode-0", "decode-1")


@pytest.fixture
def hosts() -> Iterator[Network | str]:
    """A host for each worker, or why there can be none: then they share this one."""
    made = Network.create(WORKERS)
    yield made
    if isinstance(made, Network):
        made.close()


@pytest.mark.timeout(300)
async def test_faults_cost_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: Network | str) -> None:
    """Over TCP, where a read needs both sides: one stays posted while its prefill worker is paused, one while its cable is out.
    The requests go on elsewhere with the same tokens, and once the worker is back nothing is held or doomed."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    known = questions(Oracle(MODEL), SEED, 3, prompt_tokens=200, new_tokens=16)
    faults = schedule(SEED, len(DECK), WORKERS, DECK)
    said: list[str] = []
    if isinstance(hosts, Network):
        faults.append(UNPLUG)
    else:
        said.append(f"no cable is pulled: {hosts}")
    report = Report(SEED)
    await run(
        faults, known, report, model=MODEL, log_dir=tmp_path, workers=WORKERS, clients=3, say=said.append,
        network=hosts if isinstance(hosts, Network) else None,
    )  # fmt: skip
    print("\n" + "\n".join([*said, *report.lines()]))
    assert report.defects() == []
    assert len(report.happened) == len(faults)
    assert [h.amid_read for h in report.happened if h.fault.point is Point.READING] == [True] * (len(faults) - 2)
    assert report.recovered, "no hand-off was lost"
    assert sum(e.right for e in report.exchanges) > len(known) + len(faults), "next to no load"
