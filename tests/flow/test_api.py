"""The API over the whole cluster: what a request asks for survives the hand-off, and the shipped model calls tools."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.router.http.completions import CompletionFields
from tests.flow.conftest import Flow, run_flow
from tests.flow.test_flow import complete
from tests.models.tiny import prompt

SHIPPED = Path(__file__).parents[2] / "models" / "twinflow-tiny"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_menu_items",
            "description": "Get menu items.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]
ASKS = {
    "greedy": {"temperature": 0, "logprobs": 3},
    "seeded": {"temperature": 0.9, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 2},
    "penalties": {
        "temperature": 0.7,
        "seed": 6,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "bias": {
        "temperature": 1.0,
        "seed": 7,
        "logit_bias": {"70": 5, "71": -100},
        "min_tokens": 4,
        "stop_token_ids": [70],
    },
    "samples": {"temperature": 1.0, "seed": 8, "n": 3, "logprobs": 0},
    "regex": {"temperature": 1.0, "seed": 10, "structured_outputs": {"regex": "[a-f]{3,8}"}, "logprobs": 1},
    "stop": {"temperature": 1.0, "seed": 9, "stop": ["e", "t"], "logprobs": 1, "ignore_eos": True},
}
# What is no matter of sampling.
OTHERS = {"model", "prompt", "echo", "stream", "stream_options", "max_tokens", "cache_salt", "user", "priority"}
OTHERS |= {"response_format"}  # becomes the same as structured_outputs


def test_no_option_is_left_out() -> None:
    assert set().union(*ASKS.values()) == CompletionFields.model_fields.keys() - OTHERS


async def test_every_option_gives_the_same_aggregated_and_disaggregated(checkpoint: Path) -> None:
    """Logprobs and all samples included; twice each, cold and with what the first time has left in the caches."""
    at_once = {"local_max_tokens": 4096, "policy": "least_loaded"}  # local wherever it may be
    async with run_flow(checkpoint) as remote, run_flow(checkpoint, **at_once) as local:
        for i, (name, asked) in enumerate(ASKS.items()):
            ids = prompt(20 + i, 150)
            answers = []
            for flow, route in ((local, "local"), (remote, "remote"), (remote, "remote")):
                body = {"max_tokens": 12, "ignore_eos": name != "bias", **asked}
                answer = await complete(flow, ids, **body)
                each = answer["twinflow"].get("choices", [answer["twinflow"]])
                assert {s["route"] for s in each} == {route}, name
                assert answer["usage"]["prompt_tokens"] == 150
                answers.append(answer["choices"])
            for other in answers[1:]:
                same(answers[0], other, name)
            if name == "stop":
                assert answers[0][0]["finish_reason"] == "stop" and answers[0][0]["text"]
            if name == "samples":
                assert len({c["text"] for c in answers[0]}) == 3
        await remote.clean()
        await local.clean()


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a["text"], a["finish_reason"]) == (b["text"], b["finish_reason"]), name
        if a["logprobs"] is not None:
            assert a["logprobs"]["tokens"] == b["logprobs"]["tokens"]
            assert a["logprobs"]["token_logprobs"] == pytest.approx(b["logprobs"]["token_logprobs"], abs=1e-4)
            for mine, other in zip(
                a["logprobs"]["top_logprobs"] or (), b["logprobs"]["top_logprobs"] or (), strict=True
            ):
                assert mine == pytest.approx(other, abs=1e-4), name


async def tokens_of(flow: Flow, messages: list[dict[str, Any]]) -> int:
    async with httpx.AsyncClient(base_url=flow.url, timeout=30) as http:
        told = await http.post("/tokenize", json={"messages": messages, "tools": TOOLS})
    return int(told.json()["count"])


@pytest.mark.skipif(not (SHIPPED / "model.safetensors").is_file(), reason="models/twinflow-tiny holds no weights")
async def test_the_shipped_model_calls_a_tool_and_answers() -> None:
    """Prefilled on one worker, decoded on another; the call, whole and streamed, and its result in a second turn."""
    messages: list[Any] = [{"role": "user", "content": "Hi, can I get a large latte with oat milk, please?"}]
    async with run_flow(SHIPPED, cache_bytes=64 << 20, max_running=4) as flow:
        async with openai.AsyncOpenAI(base_url=f"{flow.url}/v1", api_key="none", max_retries=0) as client:
            card = await client.models.retrieve("toy")
            assert card.model_extra is not None and card.model_extra["capabilities"]["tools"]
            ask: dict[str, Any] = {"model": "toy", "tools": TOOLS, "max_tokens": 120, "temperature": 0}
            whole = (await client.chat.completions.create(messages=messages, **ask)).choices[0]
            async with client.chat.completions.stream(messages=messages, **ask) as stream:
                async for _ in stream:
                    pass
                streamed = (await stream.get_final_completion()).choices[0]
            for choice in (whole, streamed):
                assert choice.finish_reason == "tool_calls" and not choice.message.content
                (call,) = choice.message.tool_calls or ()
                assert call.function.name == "get_menu_items"
                assert isinstance(json.loads(call.function.arguments)["query"], str)
            (call,) = whole.message.tool_calls or ()
            messages.append(whole.message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": '["Latte"]'})
            answer = await client.chat.completions.create(messages=messages, **ask)
            assert answer.usage is not None and answer.usage.prompt_tokens == await tokens_of(flow, messages)
            assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
        await flow.clean()
