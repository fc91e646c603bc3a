"""The official client: whole, streamed, async, tools, Responses; against the cluster and, for exact replies, the parrot."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from services.cli.cluster import get_json
from tests.clients.conftest import Server
from tests.clients.said import CALLING, CALLS, MENU, ORDER, STORY, TEXT, THINKING, WEATHER, user


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as c:
        yield c


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as c:
        yield c


@pytest.fixture
def parrot_client(parrot: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=parrot.url, api_key="none", max_retries=0) as c:
        yield c


def test_models(client: openai.OpenAI, server: Server) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object) == (server.model, "model")
    assert client.models.retrieve(server.model) == card
    more = card.model_extra or {}
    assert more["max_model_len"] > 1000 and more["capabilities"]["tools"] and not more["capabilities"]["vision"]
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")


def test_whole_and_streamed_chat_are_equal(client: openai.OpenAI, server: Server) -> None:
    ask: dict[str, Any] = {"model": server.model, "messages": user(STORY), "max_tokens": 24, "temperature": 0}
    raw = client.chat.completions.with_raw_response.create(**ask)
    whole = raw.parse()
    assert raw.headers["x-request-id"] == whole.id and raw.headers["x-twinflow-route"] == "remote"
    assert raw.headers["x-twinflow-decode-worker"] == "decode-0"
    (choice,) = whole.choices
    assert choice.message.content and choice.finish_reason == "length" and choice.message.role == "assistant"
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert {c.id for c in chunks} == {chunks[0].id} != {whole.id}
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and all(c.usage is None for c in chunks[:-1])
    assert whole.usage is not None and chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24


async def test_async_streams_at_once(async_client: openai.AsyncOpenAI, server: Server) -> None:
    async def one(seed: int) -> str:
        stream = await async_client.chat.completions.create(
            model=server.model, messages=user(STORY), max_tokens=16, temperature=1.0, seed=seed, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    first, again, other = await asyncio.gather(one(1), one(1), one(2))
    assert first == again != other and first


def test_logprobs_belong_to_the_text(client: openai.OpenAI, server: Server) -> None:
    ask: dict[str, Any] = {"model": server.model, "messages": user(STORY), "max_tokens": 8, "temperature": 0}
    (choice,) = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert "".join(t.token for t in tokens) == choice.message.content
    assert b"".join(bytes(t.bytes or []) for t in tokens).decode() == choice.message.content
    for t in tokens:
        assert len(t.top_logprobs) == 3 and t.logprob <= 0
        assert [x.logprob for x in t.top_logprobs] == sorted((x.logprob for x in t.top_logprobs), reverse=True)
        assert t.logprob in [x.logprob for x in t.top_logprobs] or t.logprob < t.top_logprobs[-1].logprob
    (old,) = client.completions.create(
        model=server.model, prompt="The old man", max_tokens=8, temperature=0, logprobs=2
    ).choices
    assert old.logprobs is not None and "".join(old.logprobs.tokens or []) == old.text
    assert old.logprobs.text_offset == [len("".join((old.logprobs.tokens or [])[:i])) for i in range(8)]


def test_samples_and_stops(client: openai.OpenAI, server: Server) -> None:
    ask: dict[str, Any] = {"model": server.model, "prompt": "The old man", "max_tokens": 16, "temperature": 1.0}
    some = client.completions.create(**ask, n=3, seed=3)
    assert [c.index for c in some.choices] == [0, 1, 2] and len({c.text for c in some.choices}) == 3
    assert some.usage is not None and some.usage.completion_tokens == 48
    again = client.completions.create(**ask, n=3, seed=3)
    assert [c.text for c in again.choices] == [c.text for c in some.choices]
    word = some.choices[0].text.split()[2]
    stopped = client.completions.create(**ask, seed=3, stop=[f" {word}"]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == some.choices[0].text.split(f" {word}")[0]


@pytest.mark.parametrize("how", ["whole", "stream"])
def test_a_tool_is_called_and_its_result_taken(client: openai.OpenAI, server: Server, how: str) -> None:
    ask: dict[str, Any] = {"model": server.model, "tools": [MENU], "max_tokens": 120, "temperature": 0}
    messages = user(ORDER)
    if how == "whole":
        done = client.chat.completions.create(messages=messages, **ask)
    else:
        with client.chat.completions.stream(messages=messages, **ask) as stream:
            done = stream.get_final_completion()
    (choice,) = done.choices
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function" and call.id.startswith("call_") and call.function.name == "get_menu_items"
    assert isinstance(json.loads(call.function.arguments)["query"], str)
    answer = {"role": "tool", "tool_call_id": call.id, "content": '["Latte"]'}
    messages += [choice.message.model_dump(exclude_none=True, exclude={"parsed"}), answer]
    if how == "stream":  # the helper's own field
        messages[1]["tool_calls"][0]["function"].pop("parsed_arguments", None)
    after = client.chat.completions.create(messages=messages, **ask)
    assert after.choices[0].message.content or after.choices[0].message.tool_calls


@pytest.mark.parametrize("how", ["whole", "stream"])
def test_parallel_calls(parrot_client: openai.OpenAI, how: str) -> None:
    ask: dict[str, Any] = {"model": "parrot", "messages": user(CALLING), "tools": [WEATHER]}
    if how == "whole":
        message = parrot_client.chat.completions.create(**ask).choices[0].message
    else:
        with parrot_client.chat.completions.stream(**ask) as stream:
            kinds = [e.type for e in stream]
            message = stream.get_final_completion().choices[0].message
        assert kinds.count("tool_calls.function.arguments.done") == 2
    calls = message.tool_calls or ()
    assert [json.loads(c.function.arguments) for c in calls] == CALLS and len({c.id for c in calls}) == 2
    assert not message.content


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_thoughts_and_exact_text(parrot_client: openai.OpenAI, stream: bool) -> None:
    for said, thought, text in ((THINKING, "five six", "hello there"), (TEXT, "", TEXT)):
        answer: Any = parrot_client.chat.completions.create(model="parrot", messages=user(said), stream=stream)
        parts = [c.choices[0].delta for c in answer] if stream else [answer.choices[0].message]
        assert "".join(p.content or "" for p in parts) == text
        assert "".join((p.model_extra or {}).get("reasoning_content") or "" for p in parts) == thought


def test_responses_with_a_call_and_its_output(client: openai.OpenAI, server: Server) -> None:
    tool: Any = {"type": "function", **MENU["function"]}
    ask: dict[str, Any] = {"model": server.model, "tools": [tool], "max_output_tokens": 120, "temperature": 0}
    whole = client.responses.create(input=ORDER, **ask)
    (item,) = whole.output
    assert whole.status == "completed" and item.type == "function_call" and item.name == "get_menu_items"
    with client.responses.stream(input=ORDER, **ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert final.output[0].type == "function_call" and final.output[0].arguments == item.arguments
    assert final.usage.output_tokens == whole.usage.output_tokens
    output = {"type": "function_call_output", "call_id": item.call_id, "output": '["Latte"]'}
    after = client.responses.create(input=[*user(ORDER), item.model_dump(exclude_none=True), output], **ask)
    assert after.output and after.usage.input_tokens > whole.usage.input_tokens


def test_errors_are_typed_and_name_the_field(client: openai.OpenAI, server: Server) -> None:
    ask: dict[str, Any] = {"model": server.model, "messages": user("hi"), "max_tokens": 2}
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=server.model, prompt="x", suffix="y")
    assert (refused.value.param, refused.value.code) == ("suffix", "unsupported")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ask, temperature=3)
    assert refused.value.param == "temperature" and refused.value.request_id
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model=server.model, messages=user(image))  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**(ask | {"max_tokens": 10_000_000}))
    assert refused.value.code == "too_long"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**(ask | {"model": "an-adapter"}))
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model=server.model, input="x")


def test_a_closed_stream_ends_the_generation(client: openai.OpenAI, server: Server) -> None:
    ask: dict[str, Any] = {"model": server.model, "messages": user(STORY), "max_tokens": 3000, "temperature": 0}
    stream = client.chat.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
    assert next(iter(stream)).choices
    stream.close()
    until = time.monotonic() + 20
    while (told := get_json(server.url.removesuffix("/v1"), "/health")[1])["running"]:
        assert time.monotonic() < until, told
        time.sleep(0.05)
