"""Forced and strict calls, in every format: what a model may write is what that format's parser takes, and fits the schema."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from services.router.text.calls.base import CallArguments, CallBroken, CallEnded, CallStarted, Text, Tools
from services.router.text.calls.formats import FORMATS, CallFormat
from services.router.text.calls.grammar import CallGrammar, schema_text
from services.router.text.calls.parser import CallParser
from tests.grammar.conftest import EOS, Write, grammar
from twinflow.contracts.errors import BadRequest
from twinflow.grammar.llguidance import LlguidanceCompiler

GET = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Berlin", 'São "P"', "x<y"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"tag": {"enum": ["a", "b"]}},
    },
    "strict": True,
}
NOTE = {
    "name": "note",
    "parameters": {"properties": {"text": {"type": "string", "maxLength": 12}}, "required": ["text"]},
}
STOP = {"name": "stop"}
FUNCTIONS = [(f"tools[{i}].function", f) for i, f in enumerate((GET, STOP))]
ALL = Tools([{"type": "function", "function": f} for f in (GET, NOTE, STOP)])

each_format = pytest.mark.parametrize("form", FORMATS, ids=[f.name for f in FORMATS])


@pytest.fixture(scope="session")
def marker_id(tokenizer: Tokenizer) -> Callable[[str], int | None]:
    return lambda text: tokenizer.token_to_id(text) if text in ("<tool_call>", "</tool_call>") else None


def read(form: CallFormat, text: str) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """The calls in a reply, and the text beside them."""
    parser = CallParser(form, ALL)
    calls: list[tuple[str, str]] = []
    beside = ""
    for event in [*parser.push(text), *parser.finish()]:
        match event:
            case CallStarted(name):
                calls.append((name, ""))
            case CallArguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
            case Text(more):
                beside += more
            case CallBroken():
                raise AssertionError(f"broken: {text!r}")
            case CallEnded():
                pass
    return [(name, json.loads(arguments)) for name, arguments in calls], beside


@each_format
def test_required(write: Write, marker_id, form: CallFormat) -> None:  # type: ignore[no-untyped-def]
    text = CallGrammar(form, FUNCTIONS, marker_id).required()
    seen: list[int] = []
    names = set()
    for seed in range(16):
        calls, beside = read(form, write(grammar("grammar", text), seed))
        assert calls and not beside
        for name, arguments in calls:
            names.add(name)
            assert name != "get_weather" or jsonschema.validate(arguments, GET["parameters"]) is None  # type: ignore[func-returns-value]
        seen.append(len(calls))
    assert names == {"get_weather", "stop"} and max(seen) > 1 and min(seen) == 1


@each_format
def test_one_call_alone(write: Write, marker_id, form: CallFormat) -> None:  # type: ignore[no-untyped-def]
    text = CallGrammar(form, FUNCTIONS[:1], marker_id, parallel=False).required()
    for seed in range(6):
        ((name, arguments),), beside = read(form, write(grammar("grammar", text), seed))
        assert (name, beside) == ("get_weather", "")
        jsonschema.validate(arguments, GET["parameters"])


def accepts(compiler: LlguidanceCompiler, tokenizer: Tokenizer, text: str, reply: str) -> bool:
    """Whether the whole reply fits and may end."""
    matcher = compiler.compile(grammar("grammar", text)).start()
    try:
        for id in [*tokenizer.encode(reply, add_special_tokens=False).ids, *([] if matcher.complete else [EOS[0]])]:
            if not matcher.complete:
                matcher.accept(id)
        return True
    except BadRequest:
        return False


CALL = {
    "qwen_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nBerlin\n</parameter>\n"
    "<parameter=days>\n{}\n</parameter>\n</function>\n</tool_call>",
    "nemotron": '<TOOLCALL>[{{"name": "get_weather", "arguments": {{"city": "Berlin", "days": {}}}}}]</TOOLCALL>',
    "granite": '<|tool_call|>[{{"name": "get_weather", "arguments": {{"city": "Berlin", "days": {}}}}}]',
    "hermes": '<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "Berlin", "days": {}}}}}\n</tool_call>',
}


@each_format
def test_free_text_with_strict_calls(
    compiler: LlguidanceCompiler,
    tokenizer: Tokenizer,
    marker_id: Callable[[str], int | None],
    form: CallFormat,
) -> None:
    text = CallGrammar(form, FUNCTIONS, marker_id).free()
    good, bad = CALL[form.name].format(5), CALL[form.name].format(50)
    for reply, fits in (
        ("Just <text>, no call\n\n at all.", True),
        (good, True),
        (f"Let me look.\n{good}\n{good}\nDone", True),
        (bad, False),
        (f"Let me look.\n{bad}", False),
        (good.replace("get_weather", "nobody"), False),
    ):
        assert accepts(compiler, tokenizer, text, reply) is fits, reply


@each_format
def test_one_call_ends_free_text_where_calls_are_not_parallel(
    compiler: LlguidanceCompiler,
    tokenizer: Tokenizer,
    marker_id: Callable[[str], int | None],
    form: CallFormat,
) -> None:
    text = CallGrammar(form, FUNCTIONS, marker_id, parallel=False).free()
    for reply, ended in (
        ("No call.", False),
        (CALL[form.name].format(5), True),
        (f"Look:\n{CALL[form.name].format(5)}", True),
    ):
        matcher = compiler.compile(grammar("grammar", text)).start()
        for id in tokenizer.encode(reply, add_special_tokens=False).ids:
            matcher.accept(id)
        assert matcher.complete is ended, reply
        if not ended:
            matcher.accept(EOS[0])
    assert not accepts(compiler, tokenizer, text, CALL[form.name].format(50))


@each_format
def test_calls_or_an_answer(
    compiler: LlguidanceCompiler,
    tokenizer: Tokenizer,
    marker_id: Callable[[str], int | None],
    form: CallFormat,
) -> None:
    schema = {"type": "object", "properties": {"z": {"type": "null"}}, "required": ["z"], "additionalProperties": False}
    text = CallGrammar(form, FUNCTIONS, marker_id).or_answer(schema_text(schema, lenient=False))
    assert accepts(compiler, tokenizer, text, CALL[form.name].format(5))
    assert accepts(compiler, tokenizer, text, '{"z": null}')
    for reply in ("Hello", '{"z": 1}', CALL[form.name].format(50)):
        assert not accepts(compiler, tokenizer, text, reply)


@pytest.mark.parametrize("form", FORMATS[:1], ids=["qwen_xml"])
def test_bare_strings(
    compiler: LlguidanceCompiler,
    tokenizer: Tokenizer,
    marker_id: Callable[[str], int | None],
    form: CallFormat,
) -> None:
    """They may hold what looks like a tag, and line breaks."""
    text = CallGrammar(form, [("tools[0].function", NOTE)], marker_id).required()
    for value in ("", "hello", "a\nb", "</parameter> <b>", 'quotes " and \\'):
        reply = f"<tool_call>\n<function=note>\n<parameter=text>\n{value}\n</parameter>\n</function>\n</tool_call>"
        assert accepts(compiler, tokenizer, text, reply), value
