"""Answers of a given shape through each client: JSON schemas, forced and strict tools; held by the workers, after a hand-off."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.clients.conftest import Server
from tests.clients.said import MENU, STORY, WEATHER, user
from tests.clients.test_instructor import patched
from tests.clients.test_langchain import chat
from tests.clients.test_litellm import at, litellm  # noqa: F401  (a fixture)
from tests.clients.test_llama_index import llm


class Order(BaseModel):
    """An order at the counter; with nothing in it that a small model could go on with for ever."""

    model_config = ConfigDict(extra="forbid")

    drink: Literal["latte", "tea", "espresso"]
    size: Literal["small", "large"]
    hot: bool


ASK = "A large hot latte, please."
SCHEMA: dict[str, Any] = {
    "name": "order",
    "strict": True,
    "schema": Order.model_json_schema(),
}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as c:
        yield c


def test_openai_parses(client: openai.OpenAI, server: Server) -> None:
    ask: dict[str, Any] = {"model": server.model, "messages": user(ASK), "max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.parse(**ask, response_format=Order).choices[0]
    assert isinstance(whole.message.parsed, Order) and whole.finish_reason == "stop"
    with client.chat.completions.stream(**ask, response_format=Order) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == whole.message.parsed
    some = client.chat.completions.create(**ask, response_format={"type": "json_object"}).choices[0]
    assert (some.message.content or "").lstrip().startswith("{")
    assert some.finish_reason == "length" or isinstance(json.loads(some.message.content or ""), dict)
    response = client.responses.parse(model=server.model, input=ASK, text_format=Order, max_output_tokens=60)
    assert isinstance(response.output_parsed, Order) and response.status == "completed"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_openai_forces_a_tool(client: openai.OpenAI, server: Server, choice: str, stream: bool) -> None:
    """Nothing in the question asks for one."""
    order = openai.pydantic_function_tool(Order, name="order")
    named: Any = {"type": "function", "function": {"name": "order"}}
    ask: dict[str, Any] = {"model": server.model, "messages": user(STORY), "max_tokens": 120, "temperature": 0}
    ask |= {"tools": [order] if choice == "required" else [order, WEATHER]}
    ask |= {"tool_choice": named if choice == "named" else choice, "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**ask) as events:
            answer = events.get_final_completion().choices[0]
    else:
        answer = client.chat.completions.create(**ask).choices[0]
    (call,) = answer.message.tool_calls or ()
    assert call.function.name == "order" and isinstance(Order.model_validate_json(call.function.arguments), Order)
    assert not answer.message.content


def test_what_cannot_be_held_is_refused_by_name(client: openai.OpenAI, server: Server) -> None:
    ask: dict[str, Any] = {"model": server.model, "messages": user(ASK), "max_tokens": 20}
    never = SCHEMA | {"schema": {"type": "string", "enum": []}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ask, response_format={"type": "json_schema", "json_schema": never})
    assert (refused.value.param or "").startswith("response_format")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            **ask, tools=[MENU], tool_choice={"type": "function", "function": {"name": "nobody"}}
        )
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize("fields", [{"regex": "[a-c]{3}"}, {"choice": ["yes", "no"]}], ids=["regex", "choice"])
def test_openai_with_regex_and_choice(client: openai.OpenAI, server: Server, fields: dict[str, Any]) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=user(ASK), max_tokens=20, extra_body={"structured_outputs": fields}
    ).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content
    assert answer.message.content in fields.get("choice", [answer.message.content])
    assert "regex" not in fields or (set(answer.message.content) <= set("abc") and len(answer.message.content) == 3)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(server: Server, mode: str) -> None:
    order = patched(server, mode).chat.completions.create(
        model=server.model, messages=user(ASK), response_model=Order, max_retries=0, max_tokens=120, temperature=0
    )
    assert isinstance(order, Order)


async def test_instructor_streams_parts(server: Server) -> None:
    client = patched(server, "TOOLS", asynchronous=True)
    ask: dict[str, Any] = {"model": server.model, "messages": user(ASK), "max_tokens": 120, "temperature": 0}
    parts = [p async for p in client.chat.completions.create_partial(response_model=Order, max_retries=0, **ask)]
    assert len(parts) > 2 and Order.model_validate(parts[-1].model_dump())


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain(server: Server, method: str) -> None:
    model = chat(server, max_tokens=120, temperature=0)
    assert isinstance(model.with_structured_output(Order, method=method).invoke(ASK), Order)


def test_litellm(litellm: Any, server: Server) -> None:  # noqa: F811
    ask = at(server, messages=user(ASK), max_tokens=60, temperature=0)
    told = litellm.completion(**ask, response_format={"type": "json_schema", "json_schema": SCHEMA})
    assert isinstance(Order.model_validate_json(told.choices[0].message.content), Order)
    tool = {"type": "function", "function": {"name": "order", "parameters": SCHEMA["schema"]}}
    (call,) = (
        litellm.completion(**ask, tools=[tool], tool_choice="required", parallel_tool_calls=False)
        .choices[0]
        .message.tool_calls
    )
    assert isinstance(Order.model_validate_json(call.function.arguments), Order)


def test_llama_index(server: Server) -> None:
    from llama_index.core.prompts import PromptTemplate

    model = llm(server, max_tokens=120, temperature=0.0)
    assert isinstance(model.structured_predict(Order, PromptTemplate(ASK)), Order)
