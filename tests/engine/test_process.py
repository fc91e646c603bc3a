"""The engine as a process of its own: a front that speaks to it goes on, whatever it does."""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.models.tiny import make_checkpoint
from twinflow.contracts.hashing import pack_tokens, root_hash
from twinflow.contracts.requests import GenerateRequest, SamplingParams
from twinflow.contracts.workers import Role
from twinflow.engine.base import Cancel, Done, Mode, Submit
from twinflow.engine.beats import BEAT_S
from twinflow.engine.config import EngineConfig
from twinflow.engine.outbox import Outbox
from twinflow.engine.process import ProcessEngine

MUCH = "x" * (1 << 20)  # more than a pipe holds


async def test_what_is_sent_arrives_whole_and_in_order_however_late_it_is_read() -> None:
    ours, theirs = multiprocessing.Pipe()
    outbox = Outbox(ours)
    sent = [(i, MUCH if i % 3 else "short") for i in range(20)]
    for thing in sent:
        outbox.send(thing)  # nobody reads: returns all the same
    assert await asyncio.to_thread(lambda: [theirs.recv() for _ in sent]) == sent
    outbox.send("at once")
    assert theirs.recv() == "at once"
    theirs.send("the other way")
    assert ours.recv() == "the other way", "reading still waits"
    outbox.close()
    outbox.close()


async def test_the_other_end_closes_with_something_left() -> None:
    ours, theirs = multiprocessing.Pipe()
    outbox = Outbox(ours)
    outbox.send(MUCH)
    theirs.close()

    async def go_on() -> None:
        while True:
            outbox.send("more")
            await asyncio.sleep(0.01)

    with pytest.raises(BrokenPipeError):
        await go_on()
    outbox.close()


@pytest.mark.timeout(120)
async def test_a_stopped_engine_does_not_stop_its_front(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = make_checkpoint(tmp_path, "qwen3_5", 0)
    engine = ProcessEngine()
    ready = await engine.start(
        EngineConfig(str(model), "w", "1", Role.BOTH, cache_bytes=32 << 20, transport="none", chunk_tokens=64)
    )
    process = engine._process
    assert process is not None and process.pid is not None
    await asyncio.sleep(4 * BEAT_S)  # nothing to report
    assert engine.unheard_s < 3 * BEAT_S
    os.kill(process.pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        while engine.unheard_s < 4 * BEAT_S:
            await asyncio.sleep(0.05)
    for _ in range(4):
        engine.send(Cancel(MUCH))
    request = GenerateRequest(
        "r", pack_tokens([5, 6, 7]), SamplingParams(max_tokens=2, seed=1, ignore_eos=True), root_hash(ready.fingerprint)
    )
    engine.send(Submit(request, Mode.LOCAL))
    threading.Timer(0.2, os.kill, (process.pid, signal.SIGCONT)).start()  # the loop serves on meanwhile
    async for report in engine.reports():
        if any(isinstance(n, Done) and n.id == "r" and not n.error_message for n in report.notices):
            break
    assert engine.unheard_s < 4 * BEAT_S
    await engine.close()
    assert process.exitcode == 0, "it heard that it is to end"
    assert not caplog.records
