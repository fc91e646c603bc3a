"""Tokens of a whole answer come several at a time: workers are told so where nobody looks at a part, and it changes no answer."""

import asyncio

import pytest

from benchmarks.router_load import MODEL
from benchmarks.router_sim import Pacing, Script
from benchmarks.router_soak import Fleet
from services.router.dispatch.submission import GATHER_TOKENS
from tests.router.conftest import running, until
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.hashing import pack_tokens


@pytest.mark.parametrize(
    ("fields", "gather"),
    [({}, GATHER_TOKENS), ({"n": 2}, GATHER_TOKENS), ({"stream": True}, 0), ({"stop": "zz"}, 0)],
    ids=["whole", "n", "streamed", "stop"],
)
async def test_who_may_gather(model_folder, fields, gather):
    """A stop string must be seen at once, so that nothing behind it is computed."""
    async with running(model_folder) as c:
        worker = await c.add(FakeWorker("toy"))
        assert (await c.complete(max_tokens=3, **fields)).status_code == 200
        assert {s.gather_tokens for s in worker.submits} == {gather}


async def test_a_worker_that_is_lost_between_two_reports(model_folder):
    """What it had not told is computed again elsewhere, from what it had told on."""
    prompt, new = list(range(300, 400)), 3 * GATHER_TOKENS
    body = {"model": MODEL.name, "prompt": prompt, "max_tokens": new, "temperature": 0}
    async with running(MODEL, served_model=MODEL.name) as c:
        fleet = Fleet(c.router.grpc_address, Script(c.text.texts.tokenizer), Pacing(step_s=0.02), 2)
        await fleet.start()
        try:
            await until(lambda: c.router.view.counts()["decode"] == 2)
            asking = asyncio.create_task(c.http.post("/v1/completions", json=body))
            await until(lambda: fleet.running)
            await asyncio.sleep(0.02 * GATHER_TOKENS * 1.5)  # its first token was told, and GATHER_TOKENS more
            await fleet.kill(0 if fleet.workers[0].running else 1)
            answer = (await asking).json()
            assert answer["choices"][0]["text"] == fleet.script.text(pack_tokens(prompt), new)
            assert answer["usage"]["completion_tokens"] == new
            assert c.router.metrics.registry.get_sample_value("twinflow_router_migrations_total") == 1
        finally:
            await fleet.stop()
