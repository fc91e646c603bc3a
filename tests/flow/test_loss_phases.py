"""A worker is lost in each phase of a hand-off: the request goes on, with the tokens of an undisturbed one and none twice, and
whoever is left has nothing of it afterwards."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.flow.conftest import Flow, run_flow
from tests.flow.test_flow import NEW, Oracle, complete, finish, text_of
from tests.models.tiny import prompt
from twinflow.engine.sequence import Phase, Sequence
from twinflow.transfer.intake import Phase as IntakePhase
from twinflow.transfer.loopback import Manual

IDS = prompt(1, 300)
SMALL: dict[str, Any] = {"chunk_tokens": 32, "step_tokens": 32}


def of(flow: Flow, name: str) -> list[Sequence]:
    return list(flow.engines[name].sequences.values())


def reader(flow: Flow) -> str:
    """The decode worker that has the request, "" while none has."""
    return next((name for name in flow.engines if name != "p" and of(flow, name)), "")


def received(flow: Flow, test: Callable[[Sequence], bool]) -> bool:
    return any(test(s) for s in (of(flow, reader(flow)) if reader(flow) else []))


def computed(flow: Flow, test: Callable[[Sequence], bool]) -> bool:
    return any(test(s) for s in of(flow, "p"))


# Reads do not end before the loss, but for the last two phases.
PHASES: dict[str, Callable[[Flow], bool]] = {
    "queued": lambda f: computed(f, lambda s: s.phase is Phase.WAITING),
    "mid-chunk": lambda f: computed(f, lambda s: s.phase is Phase.RUNNING and s.announced_blocks == 0),
    "announced": lambda f: computed(f, lambda s: s.phase is Phase.RUNNING and s.announced_blocks > 0),
    "first token": lambda f: received(f, lambda s: s.first is not None),
    "finished": lambda f: received(f, lambda s: s.intake is not None and bool(s.intake.outstanding_slots)),
    "pulled": lambda f: received(f, lambda s: s.intake is not None and s.intake.phase is IntakePhase.PULLED),
    "decoding": lambda f: received(f, lambda s: s.phase is Phase.RUNNING and len(s.generated) > 2),
}
READ_UNTIL = ("pulled", "decoding")


def phases(without: str, quick: tuple[str, ...]) -> list[Any]:
    """All but one; those that the others say most about run always, the rest with the slow ones."""
    return [p if p in quick else pytest.param(p, marks=pytest.mark.slow) for p in PHASES if p != without]


async def reach(flow: Flow, reads: Manual, phase: str, task: "asyncio.Task[dict[str, Any]]") -> None:
    def there() -> bool:
        assert not task.done(), "it ended before that"
        if phase in READ_UNTIL:
            finish(reads)
        return PHASES[phase](flow)

    await flow.until(there, phase)


async def served(flow: Flow, reads: Manual, task: "asyncio.Task[dict[str, Any]]") -> dict[str, Any]:
    await flow.until(lambda: finish(reads) is None and task.done(), "the request is served")
    return await task


def fail(reads: Manual) -> None:
    for read in list(reads.reads):
        read.fail("remote disconnected")


@pytest.mark.parametrize("phase", phases("decoding", ("queued", "announced", "pulled")))
async def test_a_prefill_worker_is_lost(
    checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    reads = Manual()
    async with run_flow(checkpoint, reads, **SMALL, max_running=1 if phase == "queued" else 8) as flow:
        assert flow.prefill is not None
        first = asyncio.create_task(complete(flow, prompt(9, 700))) if phase == "queued" else None
        if first is not None:
            await flow.until(lambda: computed(flow, lambda s: s.phase is Phase.RUNNING), "another one is computed")
        if phase == "pulled":
            monkeypatch.setattr(flow.prefill.offers, "pulled", lambda *message: None)
        task = asyncio.create_task(complete(flow, IDS))
        await reach(flow, reads, phase, task)
        flow.prefill._close_sessions()
        fail(reads)
        answer = await served(flow, reads, task)
        assert answer["choices"][0]["text"] == text_of(flow, oracle(IDS, NEW))
        assert answer["usage"]["completion_tokens"] == NEW
        assert "lost hand-offs (p)" in answer["twinflow"]["reason"]
        if first is not None:
            assert (await served(flow, reads, first))["usage"]["completion_tokens"] == NEW
        await flow.clean()


@pytest.mark.parametrize("phase", phases("queued", ("mid-chunk", "finished")))
async def test_a_decode_worker_is_lost(
    checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Its sessions end on both sides at once; what it had asked a prefill worker for ends with them."""
    reads = Manual()
    async with run_flow(checkpoint, reads, more_decode=("e",), **SMALL) as flow:
        assert flow.prefill is not None
        with monkeypatch.context() as patch:
            if phase == "pulled":
                patch.setattr(flow.prefill.offers, "pulled", lambda *message: None)
            task = asyncio.create_task(complete(flow, IDS))
            await reach(flow, reads, phase, task)
            lost = reader(flow)
            for session in flow.decoders[lost].peers.sessions:
                session.end("this worker is lost")
            flow.fronts[lost].routers.close()
        answer = await served(flow, reads, task)
        assert answer["choices"][0]["text"] == text_of(flow, oracle(IDS, NEW))
        assert answer["usage"]["completion_tokens"] == NEW
        assert answer["twinflow"]["decode_worker"] != lost
        await flow.clean()
