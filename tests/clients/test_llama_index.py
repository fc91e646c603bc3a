"""llama-index: `OpenAILike`, chat and completion, whole and streamed, with tools."""

import json
from typing import Any

import pytest

from tests.clients.conftest import Server
from tests.clients.said import CALLING, CALLS, ORDER, STORY, TEXT


def llm(server: Server, **fields: Any) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    known = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096, "max_retries": 0}
    return OpenAILike(model=server.model, api_base=server.url, api_key="none", **(known | fields))


def said(content: str) -> list[Any]:
    from llama_index.core.llms import ChatMessage

    return [ChatMessage(role="user", content=content)]


def menu_tool() -> Any:
    from llama_index.core.tools import FunctionTool

    def get_menu_items(query: str) -> list[str]:
        """Get menu items."""
        return [query]

    return FunctionTool.from_defaults(get_menu_items)


def weather_tool() -> Any:
    from llama_index.core.tools import FunctionTool

    def get_weather(city: str) -> str:
        """Tells the weather of a city."""
        return f"rain in {city}"

    return FunctionTool.from_defaults(get_weather)


def test_whole_and_streamed_chat_are_equal(server: Server) -> None:
    model = llm(server, max_tokens=16, temperature=0.0)
    whole = model.chat(said(STORY))
    assert whole.message.content and whole.raw.choices[0].finish_reason == "length"
    assert whole.raw.usage.completion_tokens == 16
    parts = list(model.stream_chat(said(STORY)))
    assert parts[-1].message.content == whole.message.content
    assert "".join(p.delta or "" for p in parts) == whole.message.content


async def test_async_and_completion(server: Server, parrot: Server) -> None:
    assert (await llm(parrot).achat(said(TEXT))).message.content == TEXT
    assert [p async for p in await llm(parrot).astream_chat(said(TEXT))][-1].message.content == TEXT
    old = llm(server, is_chat_model=False, max_tokens=6, temperature=0.0)
    assert "".join(p.delta for p in old.stream_complete("The old man")) == old.complete("The old man").text != ""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tools_are_called(server: Server, parrot: Server, stream: bool) -> None:
    def calls(model: Any, tool: Any, content: str) -> list[Any]:
        ask: dict[str, Any] = {"user_msg": content, "allow_parallel_tool_calls": content == CALLING}
        if stream:
            (*_, answer) = model.stream_chat_with_tools([tool], **ask)
        else:
            answer = model.chat_with_tools([tool], **ask)
        return model.get_tool_calls_from_response(answer, error_on_no_tool_call=True)

    (call,) = calls(llm(server, max_tokens=120, temperature=0.0), menu_tool(), ORDER)
    assert call.tool_name == "get_menu_items" and call.tool_id.startswith("call_") and call.tool_kwargs["query"]
    both = calls(llm(parrot), weather_tool(), CALLING)
    assert [c.tool_kwargs for c in both] == CALLS and len({c.tool_id for c in both}) == 2


def test_a_tool_result_is_answered(server: Server) -> None:
    from llama_index.core.llms import ChatMessage

    model = llm(server, max_tokens=120, temperature=0.0)
    asked = said(ORDER)
    first = model.chat_with_tools([menu_tool()], chat_history=asked)
    (call,) = model.get_tool_calls_from_response(first)
    result = ChatMessage(role="tool", content=json.dumps(["Latte"]), additional_kwargs={"tool_call_id": call.tool_id})
    talk = [*asked, first.message, result]
    after = model.chat_with_tools([menu_tool()], chat_history=talk)
    assert after.message.content or model.get_tool_calls_from_response(after, error_on_no_tool_call=False)
