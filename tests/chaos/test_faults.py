"""Real processes, a few faults from a fixed seed. The long run is `make chaos`."""

from pathlib import Path

import pytest

from tests.chaos.load import questions
from tests.chaos.report import Report
from tests.chaos.runner import run
from tests.chaos.schedule import Kind, Point, schedule
from tests.e2e.conftest import MODEL
from tests.e2e.oracle import Oracle

SEED = 297  # decode-0 dies amid an answer, prefill-0 pauses amid a read, a link is cut before a first token
DECK = ((Kind.KILL, ("decode",)), (Kind.PAUSE, ("prefill",)), (Kind.CUT, ("decode", "prefill")))
WORKERS = ("prefill-0", "decode-0", "decode-1")


@pytest.mark.timeout(300)
async def test_faults_cost_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP, where a read needs both sides: one stays posted while its prefill worker is paused. The request goes on elsewhere
    with the same tokens, and once the worker is back nothing is held or doomed."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    known = questions(Oracle(MODEL), SEED, 3, prompt_tokens=200, new_tokens=16)
    faults = schedule(SEED, len(DECK), WORKERS, DECK)
    said: list[str] = []
    report = Report(SEED)
    await run(faults, known, report, model=MODEL, log_dir=tmp_path, workers=WORKERS, clients=3, say=said.append)
    print("\n" + "\n".join([*said, *report.lines()]))
    assert report.defects() == []
    assert len(report.happened) == len(faults)
    assert [h.amid_read for h in report.happened if h.fault.point is Point.READING] == [True]
    assert report.recovered, "no hand-off was lost"
    assert sum(e.right for e in report.exchanges) > len(known) + len(faults), "next to no load"
