"""Every bad input is a 400 (404, 503) in OpenAI's shape that names the field; none reaches a worker."""

import asyncio
import json

import httpx
import pytest
import pytest_asyncio

from tests.router.conftest import running, until
from tests.router.fake_worker import FakeWorker

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}

# id, changes to a good body (None = leave out), param, text in the message
CHAT = [
    ("no-model", {"model": ...}, "model", "missing"),
    ("model-type", {"model": 3}, "model", "string"),
    ("no-messages", {"messages": ...}, "messages", "missing"),
    ("empty-messages", {"messages": []}, "messages", "at least 1"),
    ("messages-type", {"messages": "hi"}, "messages", "list"),
    ("message-type", {"messages": ["hi"]}, "messages[0]", ""),
    ("unknown-role", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "assistant"),
    ("no-role", {"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ("no-content", {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ("content-type", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    ("message-field", {"messages": [{"role": "user", "content": "x", "wat": 1}]}, "messages[0].wat", "unknown"),
    ("image", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]", "image_url"),
    ("audio", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
     "messages[0].content[1]", "input_audio"),
    ("part", {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0]", "text"),
    ("user-calls", {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls", ""),
    ("arguments", {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
     "messages[0].tool_calls[0].function.arguments", "JSON"),
    ("max-tokens-0", {"max_tokens": 0}, "max_tokens", "greater"),
    ("max-tokens-negative", {"max_tokens": -1}, "max_tokens", "greater"),
    ("max-tokens-float", {"max_tokens": 1.5}, "max_tokens", "integer"),
    ("max-tokens-text", {"max_tokens": "5"}, "max_tokens", "integer"),
    ("max-tokens-huge", {"max_tokens": 10**30}, "max_tokens", ""),
    ("max-completion-tokens-0", {"max_completion_tokens": 0}, "max_completion_tokens", "greater"),
    ("both-limits", {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
    ("over-cache", {"max_tokens": 5000}, "max_tokens", "2048"),
    ("min-over-max", {"max_tokens": 2, "min_tokens": 3}, "min_tokens", "over max_tokens"),
    ("temperature-high", {"temperature": 2.1}, "temperature", "less"),
    ("temperature-low", {"temperature": -0.1}, "temperature", "greater"),
    ("temperature-text", {"temperature": "hot"}, "temperature", "number"),
    ("temperature-bool", {"temperature": True}, "temperature", ""),
    ("temperature-inf", {"temperature": 1e999}, None, "Infinity"),
    ("top-p-0", {"top_p": 0}, "top_p", "greater"),
    ("top-p-high", {"top_p": 1.01}, "top_p", "less"),
    ("top-k", {"top_k": -2}, "top_k", "greater"),
    ("min-p", {"min_p": 1.5}, "min_p", "less"),
    ("presence", {"presence_penalty": 3}, "presence_penalty", "less"),
    ("frequency", {"frequency_penalty": -3}, "frequency_penalty", "greater"),
    ("repetition", {"repetition_penalty": 0}, "repetition_penalty", "greater"),
    ("bias-type", {"logit_bias": [1]}, "logit_bias", "dict"),
    ("bias-key", {"logit_bias": {"a": 1}}, "logit_bias", "'a'"),
    ("bias-id", {"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
    ("bias-value", {"logit_bias": {"1": 101}}, "logit_bias.1", "less"),
    ("seed", {"seed": 2**64}, "seed", "less"),
    ("seed-type", {"seed": "1"}, "seed", "integer"),
    ("stop-type", {"stop": 5}, "stop", "string"),
    ("stop-item", {"stop": ["a", 5]}, "stop", "string"),
    ("stop-many", {"stop": list("abcde")}, "stop", "at most 4"),
    ("stop-empty", {"stop": ""}, "stop", "empty"),
    ("stop-ids", {"stop_token_ids": [99999]}, "stop_token_ids", "vocabulary"),
    ("n-many", {"n": 65}, "n", "at most 64 choices"),
    ("n-0", {"n": 0}, "n", "greater"),
    ("n-type", {"n": 1.5}, "n", "integer"),
    ("tool-choice", {"tool_choice": "required"}, "tool_choice", "required"),
    ("tool-choice-named", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "needs tools"),
    ("tool-choice-allowed", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice", "not supp"),
    ("tools-of-a-model-without", {"tools": [TOOL]}, "tools", "no tool calls"),
    ("tools-no-name", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
    ("tools-type", {"tools": [{"type": "web"}]}, "tools[0].type", "function"),
    ("top-logprobs-alone", {"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ("top-logprobs-many", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less"),
    ("logprobs-type", {"logprobs": 3}, "logprobs", "boolean"),
    ("stream-type", {"stream": "yes"}, "stream", "boolean"),
    ("stream-options-alone", {"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ("stream-options-field", {"stream": True, "stream_options": {"wat": 1}}, "stream_options.wat", "unknown"),
    ("response-format", {"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ("functions", {"functions": []}, "functions", "not supported"),
    ("reasoning-effort", {"reasoning_effort": "low"}, "reasoning_effort", "not supported"),
    ("unknown", {"frobnicate": 1}, "frobnicate", "unknown field"),
    ("prompt-in-chat", {"prompt": "x"}, "prompt", "unknown field"),
    ("template-variable", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ("cache-salt", {"cache_salt": 5}, "cache_salt", "string"),
]  # fmt: skip
COMPLETIONS = [
    ("no-prompt", {"prompt": ...}, "prompt", "missing"),
    ("prompt-type", {"prompt": 5}, "prompt", "expected"),
    ("prompt-empty-list", {"prompt": []}, "prompt", "expected"),
    ("prompt-mixed", {"prompt": ["a", [1]]}, "prompt", "expected"),
    ("prompt-float-ids", {"prompt": [1.5]}, "prompt", "expected"),
    ("prompt-bool-ids", {"prompt": [True]}, "prompt", "expected"),
    ("prompt-empty", {"prompt": ""}, "prompt", "empty"),
    ("prompt-one-empty", {"prompt": ["a", ""]}, "prompt", "prompt[1]"),
    ("prompt-ids", {"prompt": [1, 99999]}, "prompt", "99999"),
    ("prompt-negative", {"prompt": [-1]}, "prompt", "-1"),
    ("prompt-many", {"prompt": ["a"] * 65}, "prompt", "at most 64"),
    ("prompt-long", {"prompt": [5] * 2048}, "prompt", "2048"),
    ("echo-logprobs", {"echo": True, "logprobs": 0}, "echo", "none of the prompt"),
    ("best-of", {"best_of": 3}, "best_of", "not supported"),
    ("suffix", {"suffix": "x"}, "suffix", "not supported"),
    ("n-many", {"prompt": ["a", "b"], "n": 33}, "n", "asked for 66"),
    ("logprobs", {"logprobs": 21}, "logprobs", "less"),
    ("logprobs-bool", {"logprobs": True}, "logprobs", "integer"),
    ("messages", {"messages": HI}, "messages", "unknown field"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model_folder):
    async with running(model_folder) as c:
        worker = await c.add(FakeWorker("toy"))
        yield c, worker


pytestmark = pytest.mark.asyncio(loop_scope="module")


def complaint(response: httpx.Response) -> dict:
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def change(body: dict, changes: dict) -> dict:
    return {k: v for k, v in (body | changes).items() if v is not ...}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "changes", "param", "text"),
    [pytest.param("chat/completions", *c[1:], id=f"chat-{c[0]}") for c in CHAT]
    + [pytest.param("completions", *c[1:], id=f"completions-{c[0]}") for c in COMPLETIONS],
)
async def test_refused_by_name(shared, path, changes, param, text, stream):
    c, worker = shared
    if stream and {"stream", "stream_options"} & changes.keys():
        pytest.skip("about streaming itself")
    body = {"model": "toy", "messages": HI} if path.startswith("chat") else {"model": "toy", "prompt": "hi"}
    body = change(body | ({"stream": True} if stream else {}), changes)
    response = await c.http.post(f"/v1/{path}", content=json.dumps(body))  # httpx itself refuses to write Infinity
    error = complaint(response)
    assert response.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert text in error["message"], error
    assert not worker.submits


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b'{"model": NaN}', "NaN"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b'{"model": "toy", "prompt": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "JSON"),
    ],
    ids=["empty", "cut", "list", "string", "nan", "bytes", "surrogate", "deep"],
)
async def test_bodies_that_are_no_json_object(shared, content, text):
    c, _ = shared
    response = await c.http.post("/v1/completions", content=content)
    assert response.status_code == 400 and text in complaint(response)["message"]


async def test_prompts_over_the_limit_name_both_numbers(shared):
    c, _ = shared
    error = complaint(await c.chat("hello " * 3000))
    prompt_tokens = len(c.encode(c.text.template.render([{"role": "user", "content": "hello " * 3000}])))
    assert error["code"] == "too_long" and error["param"] == "messages"
    assert str(prompt_tokens) in error["message"] and "the cache's limit of 2048" in error["message"]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_unknown_model_is_404(shared, path):
    c, _ = shared
    response = await c.http.post(f"/v1/{path}", json={"model": "other", "messages": HI} if "chat" in path else
                                 {"model": "other", "prompt": "x"})  # fmt: skip
    assert response.status_code == 404
    error = complaint(response)
    assert (error["code"], error["param"]) == ("unknown_model", "model") and "'toy'" in error["message"]


async def test_unknown_paths_and_methods(shared):
    c, _ = shared
    for method, path, status in (("GET", "/v1/nope", 404), ("GET", "/v1/completions", 405), ("POST", "/live", 405)):
        response = await c.http.request(method, path)
        assert response.status_code == status
        complaint(response)
    assert (await c.http.get("/v1/models/other")).status_code == 404
    assert (await c.http.get("/v1/models/toy")).json()["id"] == "toy"


async def test_too_big_bodies(model_folder):
    async with running(model_folder, max_body_bytes=1000) as c:
        response = await c.complete("x" * 1000)
        error = complaint(response)
        assert (response.status_code, error["code"]) == (413, "too_large") and "1000 bytes" in error["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_without_workers_503_with_reason(model_folder, stream):
    async with running(model_folder) as c:
        response = await c.complete(stream=stream)
        error = complaint(response)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert (error["code"], error["type"]) == ("no_decode_worker", "server_error")
        ready = await c.http.get("/ready")
        assert ready.status_code == 503 and ready.json()["reason"] == "no_decode_worker"
        assert (await c.http.get("/live")).status_code == 200
        assert (await c.http.get("/health")).json()["status"] == "no_decode_worker"


async def test_over_the_request_limit_429(model_folder):
    async with running(model_folder, max_requests=1, queue_requests=0) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.gate = asyncio.Event()
        first = asyncio.create_task(c.complete())
        await until(lambda: worker.submits)
        response = await c.complete()
        worker.gate.set()
        assert (await first).status_code == 200
        assert response.status_code == 429 and "retry-after" in response.headers
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["reason"] == "queue_full"
