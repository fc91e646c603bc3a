"""What goes to a worker for `response_format`, `structured_outputs`, strict tools and forced calls, and what is refused here.
What the grammars allow: `tests/grammar`."""

import json
from typing import Any

import pytest
import pytest_asyncio

from tests.router.conftest import TEMPLATE, build_tokenizer, running, write_model
from tests.router.fake_worker import FakeWorker
from twinflow.rpc.v1 import engine_pb2 as pb

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTION: dict[str, Any] = {"name": "get", "parameters": SCHEMA}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "stop"}}
TEACHES = "{% if tools %}{{ tools | tojson }} <tool_call></tool_call>{% endif %}" + TEMPLATE
THINKS = TEACHES + "{{ tail }}{# </think> #}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory):
    """A model that calls tools and thinks."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(["<think>", "</think>"])
    folder = write_model(tmp_path_factory.mktemp("structured") / "toy", THINKS, tokenizer)
    async with running(folder) as c:
        yield c, await c.add(FakeWorker("toy"))


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def sent(shared, **fields: object) -> pb.Grammar | None:
    """What the worker got with a chat request of these fields; None = nothing."""
    c, worker = shared
    closed = {"chat_template_kwargs": {"tail": "<think>\n\n</think>\n\n"}}
    response = await c.chat(**{"max_tokens": 1, **closed, **fields})
    assert response.status_code == 200, response.text
    sampling = worker.submits[-1].sampling
    return sampling.grammar if sampling.HasField("grammar") else None


def schema_format(**more: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **more}}


@pytest.mark.parametrize(
    ("fields", "kind", "text", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}, "response_format"),
        ({"response_format": schema_format()}, "json_schema", SCHEMA, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"', "structured_outputs.grammar"),
    ],
    ids=["json-object", "json-schema", "json", "json-text", "json-object-too", "choice", "regex", "grammar"],
)  # fmt: skip
async def test_answers(shared, fields, kind, text, field):
    grammar = await sent(shared, **fields)
    assert (grammar.kind, grammar.field) == (kind, field)
    assert (grammar.text if isinstance(text, str) else json.loads(grammar.text)) == text
    assert not grammar.HasField("think_end")
    c, worker = shared
    assert (await c.complete(max_tokens=1, **fields)).status_code == 200
    assert worker.submits[-1].sampling.grammar == grammar


@pytest.mark.parametrize(("strict", "lenient"), [(None, True), (False, True), (True, False)])
async def test_strict_says_whether_keywords_may_be_passed_over(shared, strict, lenient):
    grammar = await sent(shared, response_format=schema_format(strict=strict, description="d"))
    assert grammar.lenient is lenient


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}],
    ids=["nothing", "text", "tools", "no-tools"],
)
async def test_nothing(shared, fields):
    assert await sent(shared, **fields) is None


async def test_calls(shared):
    required = await sent(shared, tools=TOOLS, tool_choice="required")
    assert (required.kind, required.field) == ("grammar", "tools") and required.text.startswith("start: <[")
    assert ")*" in required.text and "get" in required.text and "stop" in required.text
    one = await sent(shared, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert ")*" not in one.text and "get" in one.text
    single = await sent(shared, tools=TOOLS, parallel_tool_calls=False)
    assert "start: block | TEXT" in single.text and single.lenient is False
    named = await sent(shared, tools=TOOLS, tool_choice=NAMED)
    assert ")*" not in named.text and "get" not in named.text and "stop" in named.text
    assert named.field == "tools[1].function.parameters"
    strict = [{"type": "function", "function": {**FUNCTION, "strict": True}}, TOOLS[1]]
    free = await sent(shared, tools=strict)
    assert "TEXT" in free.text and '"lenient": false' in free.text and '"lenient": true' in free.text
    either = await sent(shared, tools=TOOLS, response_format=schema_format())
    assert either.text.startswith("start: calls | answer") and either.field == "response_format.json_schema.schema"
    assert (await sent(shared, tools=TOOLS, tool_choice="none", response_format=schema_format())).kind == "json_schema"


async def test_calls_of_responses(shared):
    c, worker = shared
    tools = [{"type": "function", **t["function"]} for t in TOOLS]
    body = {"model": "toy", "input": "hi", "max_output_tokens": 1, "tools": tools}
    for more, text in (
        ({"tool_choice": "required"}, "get"),
        ({"tool_choice": {"type": "function", "name": "stop"}}, "stop"),
        ({"tool_choice": "none", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, '"a"'),
    ):
        response = await c.http.post("/v1/responses", json=body | more)
        assert response.status_code == 200, response.text
        assert text in worker.submits[-1].sampling.grammar.text
    assert response.json()["text"]["format"] == {"type": "json_schema", "name": "x", "schema": SCHEMA}


async def test_thoughts_come_first(shared):
    c, _ = shared
    start, end = (c.text.token_id(t) for t in ("<think>", "</think>"))
    for tail, want in (("<think>\n", (None, end)), ("", (start, end)), ("<think>\n\n</think>\n\n", (None, None))):
        for fields in ({"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}):
            grammar = await sent(shared, chat_template_kwargs={"tail": tail}, **fields)
            got = tuple(getattr(grammar, n) if grammar.HasField(n) else None for n in ("think_start", "think_end"))
            assert got == want, tail


async def test_thoughts_without_a_token_for_their_end(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("markless") / "toy", THINKS)
    async with running(folder) as c:
        await c.add(FakeWorker("toy"))
        for tail, status in (("<think>\n", 400), ("", 200)):
            response = await c.chat(
                max_tokens=1, chat_template_kwargs={"tail": tail}, response_format={"type": "json_object"}
            )
            assert response.status_code == status
        assert (
            "thoughts"
            in (await c.chat(chat_template_kwargs={"tail": "<think>"}, structured_outputs={"regex": "a"})).text
        )


STRICT_TOOL = {"name": "f", "strict": True, "parameters": {"type": "array"}}


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name",
         "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema",
         "missing"),
        ({"response_format": schema_format(name="a b")}, "response_format.json_schema.name", "pattern"),
        ({"response_format": schema_format(schema=True)}, "response_format.json_schema.schema", "dict"),
        ({"response_format": schema_format(strict="yes")}, "response_format.json_schema.strict", "boolean"),
        ({"response_format": schema_format(wat=1)}, "response_format.json_schema.wat", "unknown"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
         "response_format.json_schema", "does not go"),
        ({"response_format": "json"}, "response_format", "dictionary"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "json_schema"),
        ({"structured_outputs": {}}, "structured_outputs", "none"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex, choice"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "string"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]", "at least 1"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json", "object"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "one"),
        ({"structured_outputs": {"regex": "a"}, "tools": TOOLS}, "structured_outputs.regex", "tool_choice=none"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "no function"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "not supported"),
        ({"tools": [{"type": "function", "function": STRICT_TOOL}]}, "tools[0].function.parameters", "object"),
    ],
)  # fmt: skip
async def test_refused(shared, fields, param, text):
    c, worker = shared
    before = len(worker.submits)
    response = await c.chat(**fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and text in error["message"], error
    assert len(worker.submits) == before


async def test_bare_strings_are_not_promised_what_they_cannot_be_held_to(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("tags") / "toy", TEACHES)
    properties = {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}
    tool = {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": properties, "required": ["zip"]},
    }
    async with running(folder, tool_parser="qwen_xml") as c:
        await c.add(FakeWorker("toy"))
        for strict, status in ((True, 400), (False, 200)):
            tools = [{"type": "function", "function": {**tool, "strict": strict}}]
            response = await c.chat(tools=tools, tool_choice="required", max_tokens=1)
            assert response.status_code == status, response.text
            if strict:
                assert response.json()["error"]["param"] == "tools[0].function.parameters.properties.zip.pattern"


async def test_a_workers_complaint_has_its_status(shared):
    """Workers read grammars; what they refuse is told under the field's name, before anything streams."""
    from twinflow.contracts.errors import BadRequest

    c, worker = shared
    worker.error = BadRequest("structured_outputs.regex: unclosed group", param="structured_outputs.regex")
    try:
        for stream in (False, True):
            response = await c.chat(structured_outputs={"regex": "a(b"}, stream=stream)
            error = response.json()["error"]
            assert response.status_code == 400 and error["param"] == "structured_outputs.regex"
            assert (error["type"], error["code"]) == ("invalid_request_error", "bad_request")
    finally:
        worker.error = None
