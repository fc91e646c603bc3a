"""litellm: one call for every provider; here `openai/MODEL` at an address of one's own."""

import json
import os
from types import ModuleType
from typing import Any

import pytest

from tests.clients.conftest import Server
from tests.clients.said import CALLING, CALLS, MENU, ORDER, STORY, TEXT, THINKING, WEATHER, user


@pytest.fixture(scope="session")
def litellm() -> ModuleType:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the internet for prices
    import litellm

    return litellm


def at(server: Server, **fields: Any) -> dict[str, Any]:
    return {"model": f"openai/{server.model}", "api_base": server.url, "api_key": "none", "num_retries": 0, **fields}


def test_whole_and_streamed_chat_are_equal(litellm: ModuleType, server: Server) -> None:
    ask = at(server, messages=user(STORY), max_tokens=16, temperature=0)
    whole = litellm.completion(**ask)
    assert whole.choices[0].message.content and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16 and whole.usage.total_tokens == whole.usage.prompt_tokens + 16
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=ask["messages"])
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.choices[0].finish_reason == "length"
    assert (built.usage.prompt_tokens, built.usage.completion_tokens) == (whole.usage.prompt_tokens, 16)


async def test_async_and_text_completion(litellm: ModuleType, server: Server) -> None:
    ask = at(server, messages=user(STORY), max_tokens=12, temperature=1.0, seed=4)
    whole = await litellm.acompletion(**ask)
    stream = await litellm.acompletion(**ask, stream=True)
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == whole.choices[0].message.content
    old = litellm.text_completion(**at(server, prompt="The old man", max_tokens=6, temperature=0)).choices[0]
    assert old.text and old.finish_reason == "length"


def test_a_tool_is_called_and_its_result_taken(litellm: ModuleType, server: Server) -> None:
    ask = at(server, tools=[MENU], max_tokens=120, temperature=0)
    choice = litellm.completion(messages=user(ORDER), **ask).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.id.startswith("call_")
    assert call.function.name == "get_menu_items" and json.loads(call.function.arguments)["query"]
    result = {"role": "tool", "tool_call_id": call.id, "content": '["Latte"]'}
    after = litellm.completion(messages=[*user(ORDER), choice.message, result], **ask).choices[0].message
    assert after.content or after.tool_calls


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_parallel_calls_thoughts_and_exact_text(litellm: ModuleType, parrot: Server, stream: bool) -> None:
    def said(content: str, **more: Any) -> Any:
        answer = litellm.completion(**at(parrot, messages=user(content), stream=stream, **more))
        whole = litellm.stream_chunk_builder(list(answer)) if stream else answer
        return whole.choices[0].message

    calls = said(CALLING, tools=[WEATHER]).tool_calls
    assert [json.loads(c.function.arguments) for c in calls] == CALLS and len({c.id for c in calls}) == 2
    assert [c.function.name for c in calls] == ["get_weather"] * 2
    thinking = said(THINKING)
    assert (thinking.reasoning_content, thinking.content) == ("five six", "hello there")
    assert said(TEXT).content == TEXT


def test_responses(litellm: ModuleType, parrot: Server) -> None:
    ask = at(parrot, input=TEXT)
    whole = litellm.responses(**ask)
    assert whole.status == "completed" and whole.output[0].content[0].text == TEXT
    events = list(litellm.responses(**ask, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT
    assert events[-1].type == "response.completed"


def test_errors_are_typed(litellm: ModuleType, server: Server) -> None:
    with pytest.raises(litellm.BadRequestError, match="best_of"):
        litellm.completion(**at(server, messages=user("hi"), extra_body={"best_of": 2}))
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        litellm.completion(**at(server, messages=user("hi")) | {"model": "openai/nobody"})
