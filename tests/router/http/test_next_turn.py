"""The next turn of a conversation, asked before its worker has told what it holds of the last one."""

import pytest

from services.router import generation
from tests.router.conftest import running
from tests.router.fake_worker import FakeWorker

PROMPT, REPLY = list(range(10, 31)), list(range(40, 49))


@pytest.mark.parametrize(
    ("fields", "held"),
    [({}, True), ({"stream": True}, True), ({"stop": ["never"]}, True), ({"stop": ["stop"]}, False)],
    ids=["whole", "streamed", "with a stop string", "stopped by one"],
)
async def test_it_goes_where_the_reply_is(model_folder, fields, held, monkeypatch):
    monkeypatch.setattr(generation, "SHORT_TOKENS", 0)
    async with running(model_folder, admin_token="t", local_max_tokens=1000) as c:
        reply = c.encode("stop") + REPLY if not held else REPLY
        for i in range(4):
            worker = await c.add(FakeWorker("toy", f"d{i}"))
            worker.script = lambda submit: reply[: submit.sampling.max_tokens]
        assert (await c.complete(PROMPT, max_tokens=len(reply), **fields)).status_code == 200
        next_turn = [*PROMPT, *reply, 1, 2, 3]
        assert (await c.complete(next_turn, max_tokens=1)).status_code == 200
        page = await c.http.get("/v1/internal/explain", headers={"authorization": "Bearer t"})
        second, first = page.json()["decisions"]
        usable = second["predicted"]["decode_usable_tokens"]
        if held:
            assert second["decode_worker"] == first["decode_worker"]
            assert usable == len(PROMPT) + len(reply) and second["predicted"]["prefill_tokens"] == 3
        else:
            assert usable <= len(PROMPT), "it was told to give the reply up"
