"""A worker says that its engine's process is silent: its requests go on elsewhere, nobody new goes there, until it is heard."""

import asyncio
import logging

import pytest

from tests.router.conftest import Cluster, running, until
from tests.router.dispatch.test_migration import NEW, streamed
from tests.router.fake_worker import FakeWorker, echo
from twinflow.contracts.workers import Role

SILENT_S = 2.25


def whole(c: Cluster) -> str:
    prompt = c.encode("one two three")
    return c.text.texts.tokenizer.decode([prompt[i % len(prompt)] for i in range(NEW)])


def stopping(worker: FakeWorker, after: int) -> FakeWorker:
    """Says no more than so many tokens of a reply."""
    worker.script, worker.finish_last = lambda submit: echo(submit)[:after], False
    return worker


async def test_an_answer_goes_on_at_another_worker(model_folder, caplog):
    """Nothing else would tell: no step was ever reported, and the session beats on."""
    caplog.set_level(logging.INFO)
    async with running(model_folder) as c:
        silent = stopping(await c.add(FakeWorker("toy", "d0")), 5)
        task = asyncio.create_task(streamed(c))
        await until(lambda: silent.submits)
        other = await c.add(FakeWorker("toy", "d1"))
        silent.engine_silent_s = SILENT_S
        text, lines = await asyncio.wait_for(task, 10)
        assert "error" not in lines[-1] and text == whole(c)
        assert len(other.submits[0].forced) == 5 * 4
        await until(lambda: silent.cancels)
        for _ in range(6):
            assert (await c.complete(max_tokens=2)).status_code == 200
        assert len(silent.submits) == 1, "it was asked while it was silent"

        silent.engine_silent_s, silent.finish_last, silent.script = 0.1, True, echo
        await until(lambda: not any(w.stalled for w in c.router.view.snapshot().workers))
        for _ in range(20):
            assert (await c.complete(max_tokens=2)).status_code == 200
        assert len(silent.submits) > 1, "it was not taken back"
        await until(lambda: "worker d0 is used again" in caplog.messages)
    left = "worker d0 is left alone: it has heard nothing from its engine process for 2.2 s"
    assert (caplog.messages.count(left), caplog.messages.count("worker d0 is used again")) == (1, 1)


async def test_with_nobody_else_the_error_says_what_is_the_matter(model_folder):
    async with running(model_folder) as c:
        silent = stopping(await c.add(FakeWorker("toy", "d0")), 5)
        task = asyncio.create_task(streamed(c))
        await until(lambda: silent.submits)
        silent.engine_silent_s = SILENT_S
        _, lines = await asyncio.wait_for(task, 10)
        error = lines[-1]["error"]
        assert error["code"] == "worker_lost"
        assert "worker d0 has heard nothing from its engine process for 2.2 s" in error["message"]
        refused = await c.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_decode_worker")
        assert "1 whose engine stands still" in refused.json()["error"]["message"]
        assert (await c.http.get("/ready")).status_code == 503
        silent.engine_silent_s, silent.finish_last, silent.script = 0.0, True, echo
        await until(lambda: not any(w.stalled for w in c.router.view.snapshot().workers))
        assert (await c.complete()).status_code == 200
        assert not c.router.generator.running


async def test_a_prompt_is_left_to_its_decode_worker(model_folder):
    """Which is told by the prefill worker itself, and goes on from what it has; only new prompts are sent elsewhere."""
    async with running(model_folder, local_max_tokens=0) as c:
        decode = await c.add(FakeWorker("toy", "d0"))
        decode.gate = asyncio.Event()
        for i in range(2):
            await c.add(FakeWorker("toy", f"p{i}", Role.PREFILL))
        task = asyncio.create_task(c.complete(prompt="one two three", max_tokens=NEW))
        await until(lambda: decode.submits)
        first = decode.submits[0].candidates[0].worker_id
        next(w for w in c.workers if w.record.id == first).engine_silent_s = SILENT_S
        await until(lambda: any(w.stalled for w in c.router.view.snapshot().workers))
        await asyncio.sleep(1.0)  # several beats and looks
        assert len(decode.submits) == 1 and not decode.cancels
        decode.gate.set()
        assert (await task).status_code == 200
        for _ in range(6):
            assert (await c.complete(max_tokens=2)).status_code == 200
        assert all(first not in [x.worker_id for x in submit.candidates] for submit in decode.submits[1:])


@pytest.mark.parametrize("says_s", [None, 0.0, 1.9], ids=["an older worker", "just heard", "not for long"])
async def test_whoever_is_not_silent_for_long_keeps_its_requests(model_folder, says_s: float | None):
    async with running(model_folder) as c:
        worker = await c.add(FakeWorker("toy", "d0"))
        worker.engine_silent_s, worker.gate = says_s, asyncio.Event()
        task = asyncio.create_task(c.complete(max_tokens=3))
        await until(lambda: worker.submits)
        await asyncio.sleep(1.0)  # several beats and looks
        worker.gate.set()
        assert (await task).status_code == 200 and not worker.cancels
