"""Tool calls in every format: found whole and in pieces, and nothing that is no call is lost."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.router.text.calls.base import CallArguments, CallBroken, CallEnded, CallStarted, Event, Text, Tools
from services.router.text.calls.formats import FORMATS, call_format
from services.router.text.calls.parser import MAX_BROKEN, CallParser
from services.router.text.calls.xml_body import as_json
from twinflow.contracts.errors import BadRequest

SHIPPED = Path(__file__).parents[3] / "models" / "twinflow-tiny" / "chat_template.jinja"
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "at": {"type": ["array", "null"]},
    "any": {},
}
TOOLS = Tools(
    [
        {"type": "function", "function": {"name": "weather", "parameters": {"properties": PROPERTIES}}},
        {"type": "function", "function": {"name": "stop", "parameters": None}},
    ]
)
WEATHER = {"city": 'São "Paulo" {\n', "days": 3, "at": [1, {"x": "}"}], "units": None}


def json_call(name: str, arguments: dict) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def xml_call(name: str, arguments: dict) -> str:
    shown = (
        f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n" for k, v in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{''.join(shown)}</function>\n</tool_call>"


FIRST, SECOND = json_call("weather", WEATHER), json_call("stop", {})
# Two calls with text before them, as each format has it.
WRITTEN = {
    "hermes": f"So:\n<tool_call>\n{FIRST}\n</tool_call>\n<tool_call>\n{SECOND}\n</tool_call>",
    "qwen_xml": f"So:\n\n{xml_call('weather', WEATHER)}\n{xml_call('stop', {})}\n",
    "nemotron": f"So:\n<TOOLCALL>[{FIRST}, {SECOND}]</TOOLCALL>",
    "granite": f"So:<|tool_call|>[{FIRST}, {SECOND}]",
}


@dataclass
class Got:
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    broken: int = 0


def gather(events: list[Event]) -> Got:
    """As a client that keeps what has ended and drops what broke."""
    got = Got()
    for event in events:
        match event:
            case Text(text):
                got.text += text
            case CallStarted(name):
                got.calls.append((name, ""))
            case CallArguments(text):
                got.calls[-1] = (got.calls[-1][0], got.calls[-1][1] + text)
            case CallEnded():
                assert isinstance(json.loads(got.calls[-1][1]), dict)
            case CallBroken():
                got.calls.pop()
                got.broken += 1
    return got


def parse(form: str, text: str, pieces: list[str] | None = None) -> list[Event]:
    found = call_format(form, ())
    assert found is not None
    parser = CallParser(found, TOOLS)
    events = [e for piece in ([text] if pieces is None else pieces) for e in parser.push(piece)]
    return events + parser.finish()


def cut(text: str, random: random.Random) -> list[str]:
    at = sorted(random.choices(range(len(text) + 1), k=random.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize("form", WRITTEN)
def test_calls_are_the_same_wherever_the_text_is_cut(form):
    text = WRITTEN[form]
    whole = gather(parse(form, text))
    assert whole.text == "So:" and not whole.broken
    assert [(n, json.loads(a)) for n, a in whole.calls] == [("weather", WEATHER), ("stop", {})]
    rng = random.Random(form)
    assert gather(parse(form, text, list(text))) == whole
    for _ in range(60):
        assert gather(parse(form, text, cut(text, rng))) == whole


@pytest.mark.parametrize("form", WRITTEN)
def test_the_name_comes_first_and_arguments_in_pieces(form):
    events = parse(form, WRITTEN[form], list(WRITTEN[form]))
    kinds = [type(e) for e in events if not isinstance(e, Text)]
    assert kinds[0] is CallStarted and kinds[-1] is CallEnded
    first = kinds[1 : kinds.index(CallEnded)]
    assert set(first) == {CallArguments} and len(first) > 20


@pytest.mark.parametrize("form", WRITTEN)
def test_a_reply_cut_off_anywhere_loses_no_text(form):
    """Whatever was not a whole call is text in the end, and calls that ended before stay."""
    text = WRITTEN[form]
    for n in range(len(text)):
        got = gather(parse(form, text[:n], list(text[:n])))
        if not got.calls:
            assert got.text == text[:n]
        else:
            assert got.calls[0][0] == "weather" and json.loads(got.calls[0][1]) == WEATHER
            rest = got.text.removeprefix("So:").strip()
            assert text[:n].rstrip().endswith(rest)


NO_CALLS = {
    "hermes": [
        "a <tool_cal", "a < b <tool_ <tool_call", "<tool_call>", "  <tool_call>no</tool_call> after",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"name": "stop", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "stop", "arguments": {"a": tru}}</tool_call> x',
        '<tool_call>{"name": "stop", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "stop", "arguments": {"a": 1}</tool_call> x', "<tool_call></tool_call>",
        '<tool_call>{"name": "stop", "arguments": {"a": "\n"}}</tool_call>', "<tool_call>\n\n",
        '<tool_call>{"name": "stop" "arguments": {}}</tool_call>', '<tool_call>[]</tool_call>',
    ],
    "qwen_xml": [
        "<tool_call>\n<function=stop\n", "<tool_call><function=unknown></function></tool_call> x",
        "<tool_call><parameter=a>1</parameter></tool_call>", "<tool_call><function=stop>text</function></tool_call>",
        "<tool_call><function=stop><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "<tool_call><function=stop><parameter=a>1</function></tool_call> x", '<tool_call>{"name": "stop"}</tool_call>',
    ],
    "nemotron": ["<TOOLCALL>[", "<TOOLCALL>[{}]</TOOLCALL>", "<tool_call>{}</tool_call>", "<TOOL <TOOLCALL"],
    "granite": ["<|tool_call|>", "<|tool_call|>no", "<|tool", '<|tool_call|>{"name": "unknown"}'],
}  # fmt: skip


@pytest.mark.parametrize(("form", "text"), [pytest.param(f, t, id=f"{f}-{t!r}") for f in NO_CALLS for t in NO_CALLS[f]])
def test_what_only_looks_like_a_call_is_text(form, text):
    for pieces in ([text], list(text)):
        got = gather(parse(form, text, pieces))
        assert (got.text, got.calls) == (text, [])


def test_a_broken_call_hides_none_that_follow():
    good = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    for bad in ('<tool_call>{"name": "stop", "arguments": {"a": "b}</tool_call>', "<tool_call>{{</tool_call>"):
        got = gather(parse("hermes", f"{bad} {good}"))
        assert (got.text, got.calls) == (bad, [("stop", "{}")])


@pytest.mark.parametrize(
    "body", [f"[{SECOND}]", f"[{SECOND}]\n", SECOND, f"[{SECOND}, {FIRST}]"], ids=["list", "break", "one", "two"]
)
def test_a_missing_closing_marker_is_no_text(body):
    """As Granite 3.1 and later write calls."""
    for pieces in (["<tool_call>" + body], list("<tool_call>" + body)):
        got = gather(parse("hermes", "", pieces))
        assert got.text == "" and got.calls[0] == ("stop", "{}") and len(got.calls) == 1 + body.count(FIRST)


def test_white_space_belongs_to_calls_only_beside_them():
    call = '<tool_call>{"name": "stop"}</tool_call>'
    assert gather(parse("hermes", f" a \n b \n {call} \n {call} \n ", None)).text == " a \n b"
    assert gather(parse("hermes", " a \n b \n ", list(" a \n b \n "))).text == " a \n b \n "


@pytest.mark.parametrize(
    "unit", ['<tool_call>{"name": "stop", "x": "</tool_call>', "<tool_call>"], ids=["open", "empty"]
)
def test_many_broken_calls_are_looked_at_a_bounded_number_of_times(unit):
    text = unit * 3 * MAX_BROKEN
    fed = 0
    form = call_format("hermes", ())
    assert form is not None
    parser = CallParser(form, TOOLS)
    inside = parser._inside

    def counted(text: str, events: list[Event]) -> str | None:
        nonlocal fed
        fed += len(text)
        return inside(text, events)

    parser._inside = counted  # type: ignore[method-assign]
    got = gather(parser.push(text) + parser.finish())
    assert (got.text, got.calls) == (text, [])
    assert fed <= (MAX_BROKEN + 2) * len(text)


def test_keys_in_any_order_other_keys_and_arguments_as_text():
    for body in (
        '{"arguments": {"a": 1}, "name": "stop"}',
        '{"id": 7, "name": "stop", "extra": {"x": [1]}, "arguments": {"a": 1}, "type": "function", "n": null}',
        '{"name": "stop", "arguments": "{\\"a\\": 1}"}',
        '{"name": "st\\u006fp", "arguments": {"a": 1}}',
    ):
        for pieces in ([f"<tool_call>{body}</tool_call>"], list(f"<tool_call>{body}</tool_call>")):
            got = gather(parse("hermes", "", pieces))
            assert [(n, json.loads(a)) for n, a in got.calls] == [("stop", {"a": 1})], body


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        ("5", {"string", "null"}, "5"),
        ("null", {"string", "null"}, None),
        ("None", {"integer", "null"}, None),
        ("True", {"boolean"}, True),
        ("true", {"integer"}, "true"),
        ("5.5", {"integer"}, "5.5"),
        ("5.5", {"number"}, 5.5),
        ("1e999", {"number"}, "1e999"),
        ("NaN", {"number"}, "NaN"),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("soon", {"integer"}, "soon"),
        ("[1", {"array"}, "[1"),
        ("5", set(), 5),
        ('"x"', set(), '"x"'),
        ("[" * 100_000, {"array"}, "[" * 100_000),
    ],
    ids=lambda v: str(sorted(v) if isinstance(v, set) else v)[:12],
)
def test_bare_values_follow_the_schema(text, types, value):
    assert json.loads(as_json(text, frozenset(types))) == value


def test_xml_values_keep_their_own_line_breaks():
    values = "<parameter=city>\n\n a\n\n</parameter><parameter=new>1</parameter>"
    text = f"<tool_call><function=weather>{values}</function></tool_call>"
    (call,) = gather(parse("qwen_xml", text)).calls
    assert json.loads(call[1]) == {"city": "\n a\n", "new": "1"}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n<function=example>", "qwen_xml"),
        ('<tool_call>\n{"name": …', "hermes"),
        ("<TOOLCALL>[", "nemotron"),
        ("<|tool_call|>", "granite"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_format(template, name):
    form = call_format("auto", ("other", template))
    assert (form.name if form else None) == name
    assert call_format("none", (template,)) is None


def test_the_shipped_model_and_the_names():
    shipped = call_format("auto", (SHIPPED.read_text(),))
    assert shipped is not None and shipped.name == "hermes"
    assert {f.name for f in FORMATS} == set(WRITTEN)
    with pytest.raises(BadRequest, match="'pythonic'"):
        call_format("pythonic", ())


SCRAPS = {
    "hermes": [
        "<tool_call>",
        "</tool_call>",
        '{"name": "stop"',
        '"arguments": {',
        "}",
        "]",
        "[",
        ",",
        " ",
        '"',
        "\\",
        "<tool_",
    ],
    "qwen_xml": [
        "<tool_call>",
        "</tool_call>",
        "<function=stop>",
        "</function>",
        "<parameter=city>",
        "</parameter>",
        "<",
        "5",
    ],
    "nemotron": ["<TOOLCALL>", "</TOOLCALL>", "[", "]", ",", " ", "{"],
    "granite": ["<|tool_call|>", "[", "]", ",", " ", "{", "}"],
}


@pytest.mark.parametrize("form", SCRAPS)
def test_scraps_of_calls_in_any_order(form):
    """Pieces agree with the whole, and a reply without a call is its own text."""
    rng = random.Random(form)
    scraps, calls = [*SCRAPS[form], "x", "\n", FIRST, SECOND, xml_call("stop", {})], 0
    for _ in range(300):
        text = "".join(rng.choices(scraps, k=rng.randrange(14)))
        whole = gather(parse(form, text))
        assert whole == gather(parse(form, text, list(text))) == gather(parse(form, text, cut(text, rng))), text
        assert whole.calls or whole.text == text
        calls += len(whole.calls)
    assert calls
