"""Schemas that no finite text fulfils are refused; those that recur and may end are not."""

import json
import time
from typing import Any

import pytest

from tests.grammar.conftest import grammar
from twinflow.contracts.errors import BadRequest
from twinflow.grammar.finite import has_an_end
from twinflow.grammar.llguidance import LlguidanceCompiler


def node(next: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"next": next}, "required": ["next"], **more}


HERE = {"$ref": "#"}
ENDLESS = {
    "itself": node(HERE),
    "by turns": {"$defs": {"a": node({"$ref": "#/$defs/b"}), "b": node({"$ref": "#/$defs/a"})}, "$ref": "#/$defs/a"},
    "in a list": {"type": "array", "items": HERE, "minItems": 1},
    "in the first item": {"type": "array", "prefixItems": [HERE], "minItems": 1},
    "every way": node({"anyOf": [HERE, node(HERE)]}),
    "all of": node({"allOf": [{"type": "object"}, HERE]}),
}
ENDING = {
    "plain": {"type": "object"},
    "optional": {"type": "object", "properties": {"next": HERE}},
    "or nothing": node({"anyOf": [{"type": "null"}, HERE]}),
    "or null": node({"$ref": "#/$defs/n"}, **{"$defs": {"n": {"anyOf": [HERE, {"type": "null"}]}}}),
    "an empty list": {"type": "array", "items": HERE},
    "items beyond those that are needed": {"type": "array", "prefixItems": [{"type": "null"}], "items": HERE, "minItems": 1},
    "several types": node(HERE, type=["object", "null"]),
    "twice the same": {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}, "required": ["a", "b"],
        "$defs": {"n": {"type": "null"}},
    },
    "elsewhere": {"$ref": "https://example.com"},
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_endless(compiler: LlguidanceCompiler, name: str) -> None:
    assert not has_an_end(ENDLESS[name])
    with pytest.raises(BadRequest, match="contain themselves"):
        compiler.compile(grammar("json_schema", json.dumps(ENDLESS[name])))


@pytest.mark.parametrize("name", ENDING)
def test_ending(name: str) -> None:
    assert has_an_end(ENDING[name])


def test_a_search_that_would_not_end_is_given_up() -> None:
    """Every definition needs one of two others: without a bound, 2^40 ways."""
    defs = {str(i): node({"anyOf": [{"$ref": f"#/$defs/{(i + k) % 40}"} for k in (1, 2)]}) for i in range(40)}
    began_s = time.process_time()
    has_an_end({"$ref": "#/$defs/0", "$defs": defs})
    assert time.process_time() - began_s < 5
