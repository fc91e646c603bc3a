"""Tokenising, the models list, and what headers tell."""

import openai
import pytest

from services.router.http.ops import longest_tokens
from tests.router.conftest import TEMPLATE, running, until, write_model
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.requests import RequestStats
from twinflow.contracts.workers import Role

TEXT = "hello <|im_end|> größe 日😀"


async def test_tokenize_and_back(cluster):
    told = (
        await cluster.http.post("/tokenize", json={"model": "toy", "prompt": TEXT, "return_token_strs": True})
    ).json()
    assert told["tokens"] == cluster.encode(TEXT) and told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 2048 and told["token_strs"][0] == "hello"
    back = (await cluster.http.post("/detokenize", json={"tokens": told["tokens"]})).json()
    assert back == {"prompt": TEXT}


async def test_a_conversation_is_tokenised_as_it_is_served(cluster):
    messages = [{"role": "user", "content": "hi"}]
    told = (await cluster.http.post("/tokenize", json={"messages": messages})).json()
    usage = (await cluster.chat("hi", max_tokens=1)).json()["usage"]
    assert told["count"] == usage["prompt_tokens"] and told["token_strs"] is None
    bare = (await cluster.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
    assert bare["tokens"] == told["tokens"][: bare["count"]] and bare["count"] < told["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"prompt": "x", "wat": 1}, "wat"),
        ("tokenize", {"prompt": "x", "messages": []}, "messages"),
        ("tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("detokenize", {"tokens": [1, 99999]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": ["1"]}, "tokens[0]"),
        ("detokenize", {}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenised_is_refused_by_name(cluster, path, body, param):
    response = await cluster.http.post(f"/{path}", json=body)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


async def test_models_tell_length_and_capabilities(cluster, tmp_path):
    await until(lambda: longest_tokens(cluster.router.view, "toy"))
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x") as client:
        (model,) = (await client.models.list()).data
        assert (await client.models.retrieve("toy")).model_extra == model.model_extra
    assert model.model_extra["max_model_len"] == 2048
    can = model.model_extra["capabilities"]
    assert can["chat"] and not can["tools"] and not can["reasoning"] and can["structured_outputs"]
    folder = write_model(tmp_path / "toy", TEMPLATE + "{# <tool_call> </think> #}")
    async with running(folder) as c:
        card = (await c.http.get("/v1/models/toy")).json()
    assert card["capabilities"]["tools"] and card["capabilities"]["reasoning"] and card["max_model_len"] is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_headers_tell_id_and_decision(model_folder, path, stream):
    async with running(model_folder, local_max_tokens=0) as c:
        worker = await c.add(FakeWorker("toy", "d é\n"))
        worker.delay_s = 0.05  # the stream opens before the worker tells how it went
        await c.add(FakeWorker("toy", "p0", Role.PREFILL))
        response = await (c.chat if path == "chat" else c.complete)(stream=stream, max_tokens=6)
        told = response.headers
        assert told["x-twinflow-decode-worker"] == "d %C3%A9%0A"
        if stream:
            assert (told["x-twinflow-route"], told["x-twinflow-reason"]) == ("remote", "long_suffix")
            assert told["x-request-id"] in response.text
        else:  # the worker's own word, once it is known
            assert told["x-twinflow-route"] == "local" and told["x-request-id"] == response.json()["id"]
        assert told["x-twinflow-prefill-worker"] == "p0"


async def test_headers_list_what_samples_have_in_common_once(cluster):
    cluster.workers[0].stats = RequestStats(route="remote", reason="own match (2), p7", prefill_worker="p7")
    told = (await cluster.complete(n=3)).headers
    assert (told["x-twinflow-route"], told["x-twinflow-prefill-worker"]) == ("remote", "p7")
    assert told["x-twinflow-reason"] == "own match (2), p7"


async def test_errors_have_an_id_too(cluster):
    ids = {(await cluster.complete(n=0)).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    cluster.workers[0].die_after = 0
    failed = await cluster.complete()
    assert failed.status_code == 502 and failed.headers["x-request-id"].startswith("cmpl-")
