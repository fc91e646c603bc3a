"""langchain-openai: `ChatOpenAI` with tools, streams, batches, and over Responses."""

from typing import Any

import pytest

from tests.clients.conftest import Server
from tests.clients.said import CALLING, CALLS, MENU, ORDER, STORY, TEXT, WEATHER


def chat(server: Server, **fields: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=server.model, base_url=server.url, api_key="none", max_retries=0, **fields)  # type: ignore[arg-type]


def whole(chunks: list[Any]) -> Any:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


def test_whole_and_streamed_chat_are_equal(server: Server) -> None:
    model = chat(server, max_tokens=16, temperature=0, stream_usage=True)
    answer = model.invoke(STORY)
    assert answer.content and answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 16
    streamed = whole(list(model.stream(STORY)))
    assert streamed.content == answer.content and streamed.response_metadata["finish_reason"] == "length"
    assert {k: streamed.usage_metadata[k] for k in ("input_tokens", "output_tokens", "total_tokens")} == {
        k: answer.usage_metadata[k] for k in ("input_tokens", "output_tokens", "total_tokens")
    }


async def test_async_batches_and_logprobs(server: Server) -> None:
    model = chat(server, max_tokens=8, temperature=1.0, seed=9, logprobs=True, top_logprobs=2)
    first, second = await model.abatch([STORY, STORY])
    assert first.content == second.content == whole([c async for c in model.astream(STORY)]).content
    told = first.response_metadata["logprobs"]["content"]
    assert "".join(t["token"] for t in told) == first.content and len(told[0]["top_logprobs"]) == 2


@pytest.mark.parametrize("how", ["whole", "stream"])
def test_a_tool_is_called_and_its_result_taken(server: Server, how: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat(server, max_tokens=120, temperature=0).bind_tools([MENU])
    messages: list[Any] = [HumanMessage(ORDER)]
    answer = model.invoke(messages) if how == "whole" else whole(list(model.stream(messages)))
    (call,) = answer.tool_calls
    assert call["name"] == "get_menu_items" and call["id"].startswith("call_") and call["args"]["query"]
    assert not answer.invalid_tool_calls and answer.response_metadata["finish_reason"] == "tool_calls"
    after = model.invoke([*messages, answer, ToolMessage('["Latte"]', tool_call_id=call["id"])])
    assert after.content or after.tool_calls


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_parallel_calls_and_exact_text(parrot: Server, responses: bool) -> None:
    model = chat(parrot, use_responses_api=responses)
    for answer in (model.invoke(TEXT), whole(list(model.stream(TEXT)))):
        assert answer.text == TEXT
    tools = model.bind_tools([WEATHER])
    for answer in (tools.invoke(CALLING), whole(list(tools.stream(CALLING)))):
        assert [c["args"] for c in answer.tool_calls] == CALLS
        assert len({c["id"] for c in answer.tool_calls}) == 2


def test_errors_are_openais(server: Server) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="best_of"):
        chat(server, extra_body={"best_of": 2}).invoke("hi")
