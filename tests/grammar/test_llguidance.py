"""Every kind of grammar over the shipped model's tokenizer: what comes out fits, and what is none is refused by name."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.grammar.conftest import EOS, VOCAB, Write, allowed, grammar
from twinflow.contracts.errors import BadRequest, ModelError
from twinflow.grammar import llguidance
from twinflow.grammar.base import JSON_SPACE, TooComplex, words_of
from twinflow.grammar.llguidance import MAX_TEXT_BYTES, LlguidanceCompiler

SCHEMAS = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"enum": ["a", "b", None, 3]}, "minItems": 1, "maxItems": 4},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["tags", "where"],
        "additionalProperties": False,
        "$defs": {
            "place": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}]},
        },
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "number"}, "c": {"const": "x"}},
        "additionalProperties": False,
    },
    "date": {"type": "string", "format": "date"},
    "markers": {"enum": ["<|im_end|>", "<tool_call>"]},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_schemas(write: Write, name: str) -> None:
    texts = {write(grammar("json_schema", json.dumps(SCHEMAS[name])), seed) for seed in range(12)}
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    assert len(texts) > 1, "one text alone shows little"


def test_any_object(write: Write) -> None:
    for seed in range(6):
        assert isinstance(json.loads(write(grammar("json_schema", '{"type": "object"}'), seed)), dict)


@pytest.mark.parametrize(
    "regex", ["[0-9]{3}-[0-9]{4}", "(yes|no)( please)?", "[^<>]{1,9}", "é+è?", "<tool_call>x", "a/b"]
)
def test_regexes(write: Write, regex: str) -> None:
    for seed in range(6):
        assert re.fullmatch(regex, write(grammar("regex", regex), seed))


def test_choices(write: Write) -> None:
    choices = ["positive", "negative", 'with "quotes"', "a\nb", "é", "<|im_end|>", "pos"]
    of = grammar("choice", json.dumps(choices))
    found = {write(of, seed) for seed in range(60)}
    assert found <= set(choices) and len(found) > 3


@pytest.mark.parametrize(
    "text",
    [
        'start: word ("," word)*\nword: /[a-z]{1,5}/\n',
        'root ::= word ("," word)*\nword ::= [a-z] | [a-z] [a-z] [a-z]\n',
    ],
    ids=["lark", "gbnf"],
)
def test_grammars(write: Write, text: str) -> None:
    for seed in range(6):
        assert re.fullmatch(r"[a-z]{1,5}(,[a-z]{1,5})*", write(grammar("grammar", text), seed))


# name, kind, text, what the message says
NONE = [
    ("regex", "regex", "a(b", "unclosed group"),
    ("regex-look-ahead", "regex", "a(?=b)", "look-around"),
    ("regex-of-nothing", "regex", "[^\\s\\S]", "no text fulfils it"),
    ("type", "json_schema", '{"type": "strin"}', "strin"),
    ("not-json", "json_schema", "{", ""),
    ("keyword", "json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ("reference", "json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
    ("remote", "json_schema", '{"$ref": "https://example.com/x"}', "example.com"),
    ("unsatisfiable", "json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "nsatisfiable"),
    ("contradiction", "json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "nsatisfiable"),
    (
        "required-of-nothing",
        "json_schema",
        '{"type":"object","properties":{"a":false},"required":["a"]}',
        "nsatisfiable",
    ),
    ("empty-enum", "json_schema", '{"enum": []}', "nsatisfiable"),
    ("pattern-and-length", "json_schema", '{"type":"string","pattern":"^[a-z]{3}$","maxLength":2}', "nsatisfiable"),
    ("lark", "grammar", "start: nobody", "nobody"),
    ("neither", "grammar", "what is this", "::="),
]


@pytest.mark.parametrize(("kind", "text", "says"), [c[1:] for c in NONE], ids=[c[0] for c in NONE])
def test_what_is_none_is_refused(compiler: LlguidanceCompiler, kind: str, text: str, says: str) -> None:
    with pytest.raises(BadRequest) as refused:
        compiler.compile(grammar(kind, text, field="the.field"))
    error = refused.value
    assert error.param == "the.field" and error.message.startswith("the.field: ") and says in error.message
    assert len(error.message) < 400 and "\n" not in error.message


def test_lenient_schemas_pass_over_what_cannot_be_enforced(write: Write) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "integer", "maximum": 9, "minimum": 0}}
    assert isinstance(json.loads(write(grammar("json_schema", json.dumps(schema), lenient=True))), list)


HEAVY = [
    ("long", "json_schema", json.dumps({"enum": ["x" * MAX_TEXT_BYTES]})),
    ("long-grammar", "grammar", 'start: "' + "x" * (1 << 16) + '"'),
    ("deep", "grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
]


@pytest.mark.parametrize(("kind", "text"), [c[1:] for c in HEAVY], ids=[c[0] for c in HEAVY])
def test_what_costs_too_much_is_refused(compiler: LlguidanceCompiler, kind: str, text: str) -> None:
    with pytest.raises(BadRequest, match=r"the\.field"):
        compiler.compile(grammar(kind, text, field="the.field"))


def test_one_whose_first_mask_takes_too_long_is_refused(
    compiler: LlguidanceCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one takes a quarter of a second and more, others a thousandth of that."""
    monkeypatch.setattr(llguidance, "MAX_MASK_S", 0.02)
    with pytest.raises(BadRequest, match=r"the\.field: what may come next took"):
        compiler.compile(grammar("regex", "a{2000000}", field="the.field"))


def test_a_grammar_may_become_too_complex_later(compiler: LlguidanceCompiler) -> None:
    matcher = compiler.compile(grammar("regex", "([a-z]{1,100}){1,100}", field="the.field")).start()
    row, rng = np.zeros(words_of(VOCAB), dtype=np.int32), random.Random(0)

    def go_on() -> None:
        for _ in range(100):
            matcher.fill(row)
            matcher.accept(rng.choice([t for t in allowed(row) if t not in EOS]))

    with pytest.raises(TooComplex, match=r"the\.field"):
        go_on()


def test_markers_are_no_text(compiler: LlguidanceCompiler, tokenizer: Tokenizer) -> None:
    """Inside a string no token may end the reply or open a call, but their characters may stand there."""
    matcher = compiler.compile(grammar("json_schema", '{"type": "string"}')).start()
    row = np.zeros(words_of(VOCAB), dtype=np.int32)
    matcher.accept(tokenizer.token_to_id('"'))
    matcher.fill(row)
    markers = [i for i, t in tokenizer.get_added_tokens_decoder().items()]
    assert not set(markers) & set(allowed(row)) and len(allowed(row)) > 1000
    for c in "<|im_end|>":
        matcher.accept(tokenizer.token_to_id(c))
    matcher.fill(row)
    assert tokenizer.token_to_id('"') in allowed(row)


def test_a_grammar_may_name_a_marker(compiler: LlguidanceCompiler, tokenizer: Tokenizer) -> None:
    id = tokenizer.token_to_id("<tool_call>")
    matcher = compiler.compile(grammar("grammar", f'start: <[{id}]> "x"')).start()
    row = np.zeros(words_of(VOCAB), dtype=np.int32)
    matcher.fill(row)
    assert allowed(row) == [id]
    matcher.accept(id)
    matcher.accept(tokenizer.token_to_id("x"))
    assert matcher.complete


def test_the_end_is_allowed_exactly_where_it_fits(compiler: LlguidanceCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(grammar("regex", "[0-9]{1,3}")).start()
    row = np.zeros(words_of(VOCAB), dtype=np.int32)
    seen = []
    for token in [tokenizer.token_to_id(d) for d in "123"]:
        matcher.fill(row)
        seen.append((set(EOS) <= set(allowed(row)), matcher.complete))
        matcher.accept(token)
    matcher.fill(row)
    assert seen == [(False, False), (True, False), (True, False)]
    assert matcher.complete and set(allowed(row)) == set(EOS)
    with pytest.raises(BadRequest, match="left its grammar"):
        matcher.accept(tokenizer.token_to_id("4"))


def test_white_space_is_bounded(compiler: LlguidanceCompiler, tokenizer: Tokenizer) -> None:
    """Else a small model writes line breaks until its tokens are used up."""
    of = grammar("json_schema", json.dumps(SCHEMAS["object"]))
    for text, fits in (
        ('{"name": "a", "age": 1}', True),
        ('{"name":"a","age":1}', True),
        ('{\n  "name": "a",\n  "age": 1\n}', True),
        ('{\n\n"name": "a", "age": 1}', False),
        ('{  "name": "a", "age": 1}', False),
    ):
        matcher = compiler.compile(of).start()
        try:
            for id in tokenizer.encode(text, add_special_tokens=False).ids:
                matcher.accept(id)
            assert fits and matcher.complete, text
        except BadRequest:
            assert not fits, text
    assert re.fullmatch(JSON_SPACE, "\n" + " " * 20)


def test_tokenizers_that_cannot_be_used(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "tokenizer.json"
    for text in ("", "{}", '{"model": {}}', '{"model": {"vocab": {}}, "added_tokens": []}'):
        file.write_text(text)
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            LlguidanceCompiler(file, 100, (1,))
    with pytest.raises(ModelError, match="ending token"):
        LlguidanceCompiler(file, 100, ())


# ---- random schemas ----

_names = st.text("abcxyz_ é", min_size=1, max_size=6)
_leaf = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.tuples(st.integers(-50, 50), st.integers(0, 60)).map(
        lambda p: {"type": "integer", "minimum": p[0], "maximum": p[0] + p[1]}
    ),
    st.just({"type": "number", "minimum": -1, "exclusiveMaximum": 10}),
    st.tuples(st.integers(0, 3), st.integers(0, 8)).map(
        lambda p: {"type": "string", "minLength": p[0], "maxLength": p[0] + p[1]}
    ),
    st.sampled_from(["^[a-f]+[0-9]{2}$", "^(ja|nein)$", "x"]).map(
        lambda p: {"type": "string", "pattern": p, "maxLength": 30}
    ),
    st.lists(st.one_of(st.none(), st.booleans(), st.integers(-9, 9), _names), min_size=1, max_size=4).map(
        lambda v: {"enum": v}
    ),
)


def _deeper(inner: st.SearchStrategy) -> st.SearchStrategy:
    objects = st.dictionaries(_names, inner, min_size=0, max_size=4).flatmap(
        lambda p: (
            st.lists(st.sampled_from(sorted(p)), unique=True, max_size=4).map(
                lambda r: {"type": "object", "properties": p, "required": r, "additionalProperties": False}
            )
            if p
            else st.just({"type": "object", "additionalProperties": False})
        )
    )
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda a: {"type": "array", "items": a[0], "minItems": a[1], "maxItems": a[1] + a[2]}
    )
    return st.one_of(objects, arrays, st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s}))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schema=st.recursive(_leaf, _deeper, max_leaves=8), seed=st.integers(0, 1 << 20))
def test_what_random_schemas_let_through_is_valid(write: Write, schema: dict, seed: int) -> None:
    text = write(grammar("json_schema", json.dumps(schema)), seed)
    jsonschema.validate(json.loads(text), schema)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(kind=st.sampled_from(["regex", "grammar", "json_schema", "choice"]), text=st.text(max_size=60))
def test_any_text_compiles_or_is_refused(compiler: LlguidanceCompiler, kind: str, text: str) -> None:
    refused = None
    try:
        compiler.compile(grammar(kind, text, field="f"))
    except BadRequest as e:
        refused = e
    assert refused is None or refused.param == "f"
