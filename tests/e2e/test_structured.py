"""Structured outputs of the shipped model through the `openai` client: valid, and the same aggregated and handed off over real
NIXL. After a killed decode worker: `test_migration.py`."""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.conftest import Workers

Clients = tuple[openai.OpenAI, openai.OpenAI]  # of the aggregated cluster, of the other one

STORY = [{"role": "user", "content": "Once upon a time a king lived in a castle by the sea. Describe him. " * 6}]


class Person(BaseModel):
    """What a small model ends in time."""

    mood: Literal["glad", "sad"]
    age: Annotated[int, Field(ge=0, le=150)]
    rich: bool
    titles: Annotated[list[Literal["king", "duke"]], Field(max_length=2)]


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Berlin", "Paris"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "stop"}}
GRAMMAR = 'start: word (" " word)*\nword: /[a-z]{2,6}/\n'
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.95, "seed": 5}]
samplings = pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])


@pytest.fixture(scope="module")
def disaggregated(workers: Workers) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{workers.cluster.base_url}/v1", api_key="x", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def both(aggregated: Workers, disaggregated: openai.OpenAI) -> Iterator[Clients]:
    with openai.OpenAI(base_url=f"{aggregated.cluster.base_url}/v1", api_key="x", max_retries=0, timeout=120) as client:
        yield client, disaggregated


def name_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """The first choice of a chat answer."""
    body: dict[str, Any] = {"model": name_of(client), "messages": STORY, "max_tokens": 300, **fields}
    return client.chat.completions.create(**body).choices[0]


@samplings
def test_a_schema(both: Clients, sampling: dict[str, Any]) -> None:
    """The client's own `parse`, which sends a strict schema."""
    told = []
    for client in both:
        answer = client.chat.completions.parse(
            model=name_of(client), messages=STORY, response_format=Person, max_tokens=600, **sampling
        ).choices[0]  # fmt: skip
        assert answer.finish_reason == "stop"
        assert isinstance(answer.message.parsed, Person)
        told.append(answer.message.content)
    assert told[0] == told[1]


OUTPUTS: list[tuple[str, dict[str, Any], str]] = [
    ("json-object", {"response_format": {"type": "json_object"}}, r"\{.*"),
    ("regex", {"extra_body": {"structured_outputs": {"regex": "(the|a) [a-z]{3,9} of [A-Z][a-z]{2,8}"}}},
     "(the|a) [a-z]{3,9} of [A-Z][a-z]{2,8}"),
    ("choice", {"extra_body": {"structured_outputs": {"choice": ["a good king", "a bad king", "no king"]}}},
     "(a good|a bad|no) king"),
    ("grammar", {"extra_body": {"structured_outputs": {"grammar": GRAMMAR}}}, "[a-z]{2,6}( [a-z]{2,6})*"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "pattern", "sampling"),
    [(*c[1:], SAMPLINGS[i % 2]) for i, c in enumerate(OUTPUTS)],
    ids=[c[0] for c in OUTPUTS],
)
def test_kinds(both: Clients, sampling: dict[str, Any], fields: Any, pattern: str) -> None:
    """Logprobs included: those of the model itself, whatever was allowed."""
    told = [ask(client, max_tokens=60, logprobs=True, top_logprobs=2, **fields, **sampling) for client in both]
    for choice in told:
        assert re.fullmatch(pattern, choice.message.content, re.DOTALL), choice
        assert choice.finish_reason in ("stop", "length")
        assert all(t.logprob > -1e4 and len(t.top_logprobs) == 2 for t in choice.logprobs.content)
    texts = [[t.token for t in c.logprobs.content] for c in told]
    assert told[0].message.content == told[1].message.content and texts[0] == texts[1]
    for a, b in zip(*(c.logprobs.content for c in told), strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


@samplings
def test_forced_calls(both: Clients, sampling: dict[str, Any]) -> None:
    told = []
    for client in both:
        required = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **sampling)
        (call,) = required.message.tool_calls
        assert required.finish_reason == "tool_calls" and required.message.content is None
        if call.function.name == "weather":
            arguments = json.loads(call.function.arguments)
            assert arguments["city"] in ("Berlin", "Paris") and 1 <= arguments["days"] <= 9
        named = ask(client, tools=TOOLS, tool_choice=NAMED, **sampling)
        assert [(c.function.name, c.function.arguments) for c in named.message.tool_calls] == [("stop", "{}")]
        told.append((call.function.name, call.function.arguments))
    assert told[0] == told[1]


def test_streams_and_samples(disaggregated: openai.OpenAI) -> None:
    client = disaggregated
    outputs = {"structured_outputs": {"regex": "[a-z]{5,10}!"}}
    seen = ["", "", ""]
    for chunk in client.chat.completions.create(
        model=name_of(client),
        messages=STORY,
        n=3,
        stream=True,
        max_tokens=40,
        temperature=1.0,
        seed=1,
        extra_body=outputs,
    ):  # type: ignore[call-overload]
        for choice in chunk.choices:
            seen[choice.index] += choice.delta.content or ""
    assert all(re.fullmatch("[a-z]{5,10}!", text) for text in seen) and len(set(seen)) > 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 3}}}, "structured_outputs.json"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "wat"}}}},
     "response_format.json_schema.schema"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=["regex", "grammar", "unsatisfiable", "schema"])
def test_what_is_no_grammar(both: Clients, fields: Any, param: str, stream: bool) -> None:
    for client in both:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=name_of(client), messages=STORY, stream=stream, extra_body=fields)  # type: ignore[call-overload]
        assert refused.value.param == param and param in refused.value.message
        assert refused.value.type == "invalid_request_error"
