"""Structured outputs through all three services: thoughts before the answer, strict tools, a grammar that is none."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch

from tests.flow.conftest import VOCAB, Flow, run_flow
from tests.models.tiny import make_checkpoint
from tests.router.conftest import TEMPLATE, build_tokenizer, write_model

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
THINKS = "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}" + TEMPLATE + "{{ tail }}{# </think> #}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22, 333]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
STRICT = [{"type": "function", "function": {"name": "go", "strict": True, "parameters": SCHEMA}}]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def flow(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Flow]:
    """A model with random weights that calls tools and thinks; every prompt is handed off."""
    torch.set_num_threads(1)
    folder = make_checkpoint(tmp_path_factory.mktemp("thinks"), "qwen3_5", 0, vocab_size=VOCAB, eos_token_id=2)
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(list(TAGS))
    async with run_flow(write_model(Path(folder), THINKS, tokenizer, eos_token="<|im_end|>")) as flow:
        yield flow


async def ask(flow: Flow, tail: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hello there " * 8}], "max_tokens": 120, "seed": 1}
    async with httpx.AsyncClient(base_url=flow.url, timeout=60) as http:
        variables = {"chat_template_kwargs": {"tail": tail}}
        answer = await http.post("/v1/chat/completions", json=body | variables | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


async def bias(flow: Flow, *tags: str) -> dict[str, Any]:
    """They are wanted more than anything else, the first one most."""
    told = {}
    async with httpx.AsyncClient(base_url=flow.url, timeout=60) as http:
        for i, tag in enumerate(tags):
            (id,) = (await http.post("/tokenize", json={"prompt": tag, "add_special_tokens": False})).json()["tokens"]
            told[str(id)] = 100.0 / 2**i
    return {"logit_bias": told}


async def test_thoughts_then_the_answer(flow: Flow) -> None:
    """The end of the reply is wanted most, but there is none before the answer; then the end of the thoughts."""
    wants = await bias(flow, "<|im_end|>", "</think>")
    free = await ask(flow, "<think>\n", response_format=FORMAT, max_tokens=12)
    assert free["message"]["reasoning_content"] and not free["message"]["content"] and free["finish_reason"] == "length"
    choice = await ask(flow, "<think>\n", response_format=FORMAT, **wants)
    assert json.loads(choice["message"]["content"])["a"] in (1, 22, 333) and choice["finish_reason"] == "stop"
    closed = await ask(flow, "<think>\n\n</think>\n\n", response_format=FORMAT)
    assert json.loads(closed["message"]["content"])["a"] in (1, 22, 333)
    own = await ask(
        flow, "", response_format=FORMAT, **await bias(flow, "</think>", "<think>")
    )  # it opens them by itself
    assert json.loads(own["message"]["content"])["a"] in (1, 22, 333)
    assert not own["message"].get("reasoning_content")
    await flow.clean()


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0}], ids=["greedy", "sampled"])
async def test_strict_tools_are_held_to_their_schema_once_they_are_called(flow: Flow, sampling: dict[str, Any]) -> None:
    closed = "<think></think>"
    choice = await ask(flow, closed, tools=STRICT, **await bias(flow, "<tool_call>"), max_tokens=200, **sampling)
    calls = choice["message"]["tool_calls"]
    assert calls and all(c["function"]["name"] == "go" for c in calls)
    assert all(json.loads(c["function"]["arguments"])["a"] in (1, 22, 333) for c in calls)
    text = await ask(flow, closed, tools=STRICT, max_tokens=20, **await bias(flow, "<|im_end|>"), **sampling)
    assert "tool_calls" not in text["message"] and text["finish_reason"] == "stop"
    await flow.clean()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_is_no_grammar_has_its_status(flow: Flow, stream: bool) -> None:
    body = {"model": "toy", "prompt": "hello there", "structured_outputs": {"regex": "a(b"}, "stream": stream}
    async with httpx.AsyncClient(base_url=flow.url, timeout=60) as http:
        answer = await http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "structured_outputs.regex" and "unclosed" in error["message"]
    await flow.clean()
