"""Real processes, a few faults from a fixed seed. The long run is `make chaos`."""

from pathlib import Path

import pytest

from tests.chaos.load import questions
from tests.chaos.runner import run
from tests.chaos.schedule import Kind, schedule
from tests.e2e.conftest import MODEL
from tests.e2e.oracle import Oracle

SEED = 576  # a decode worker dies amid an answer, the prefill worker pauses amid another, a link is cut
DECK = ((Kind.KILL, ("decode",)), (Kind.PAUSE, ("prefill",)), (Kind.CUT, ("decode", "prefill")))
WORKERS = ("prefill-0", "decode-0", "decode-1")


@pytest.mark.timeout(300)
async def test_faults_cost_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP, where a read needs both sides."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    known = questions(Oracle(MODEL), SEED, 3, prompt_tokens=200, new_tokens=16)
    faults = schedule(SEED, len(DECK), WORKERS, DECK)
    said: list[str] = []
    report = await run(
        faults, known, model=MODEL, log_dir=tmp_path, seed=SEED, workers=WORKERS, clients=3, say=said.append
    )
    print("\n" + "\n".join([*said, *report.lines()]))
    assert report.defects() == []
    assert len(report.happened) == len(faults)
    assert sum(e.right for e in report.exchanges) > len(known) + len(faults), "next to no load"
