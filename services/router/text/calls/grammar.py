"""Grammars that hold a reply to a model's way of writing calls, in the Lark dialect that workers take.

required   start: the calls                             the reply is one or more of them
free       start: any text with calls in it             what begins as a call must be one of an offered tool
or_answer  start: the calls, or an answer of a schema
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.router.text.calls.formats import CallFormat, Shape
from twinflow.contracts.errors import BadRequest, Unsupported
from twinflow.grammar.base import JSON_SPACE

_BARE_ONLY = ("pattern", "format", "minLength", "maxLength")  # of strings; a bare value in tags cannot be held to them

Function = Mapping[str, Any]  # name, parameters, strict


class CallGrammar:
    """Of one request. `marker_id` tells the token of a marker that is one, None = it is text."""

    def __init__(
        self,
        form: CallFormat,
        functions: Sequence[tuple[str, Function]],
        marker_id: Callable[[str], int | None],
        parallel: bool = True,
    ) -> None:
        """`functions` that may be called, each with its path in the request. Raises BadRequest, naming it, for parameters that
        are no object, and Unsupported for strict ones that this format cannot hold a model to."""
        self._form = form
        self._marker_id = marker_id
        self._parallel = parallel
        self._lines: list[str] = []
        names = [self._function(i, path, function) for i, (path, function) in enumerate(functions)]
        self._lines.append(f"one: {' | '.join(names)}")
        self._rest()

    def required(self) -> str:
        opened = f"{self._marker(self._form.open)} rest"
        more = f' ("\\n" {opened})*' if self._parallel and self._form.shape is not Shape.JSON_LIST else ""
        return self._text(f"start: {opened}{more}")

    def free(self) -> str:
        id = self._marker_id(self._form.open)
        open = json.dumps(self._form.open) if id is None else f"<[{id}]>"
        rule = "opening[lazy]" if id is None else "opening"
        start = "start: block* TEXT" if self._parallel else "start: block | TEXT"  # one call ends the reply
        return self._text(start, "block: opening rest", f"{rule}: TEXT {open}", "TEXT: /(.|\\n)*/")

    def or_answer(self, schema: str) -> str:
        """`schema`: JSON text."""
        calls = self.required().removeprefix("start:")
        return f"start: calls | answer\nanswer: %json {schema}\ncalls:{calls}"

    def _text(self, *lines: str) -> str:
        return "\n".join([*lines, *self._lines]) + "\n"

    def _marker(self, text: str) -> str:
        id = self._marker_id(text)
        return json.dumps(text) if id is None else f"<[{id}]>"

    def _rest(self) -> None:
        """What follows the opening marker."""
        close = self._marker(self._form.close) if self._form.close else ""
        if self._form.shape is Shape.JSON_LIST:
            more = ' (", " one)*' if self._parallel else ""
            self._lines.append(f'rest: "[" one{more} "]" {close}'.rstrip())
        else:
            self._lines.append(f'rest: "\\n" one "\\n" {close}')

    def _function(self, i: int, path: str, function: Function) -> str:
        schema = dict(function.get("parameters") or {})
        schema.setdefault("type", "object")
        if schema["type"] != "object":
            where = f"{path}.parameters"
            raise BadRequest(f"{where}: expected the schema of an object", param=where)
        strict = bool(function.get("strict"))
        if self._form.shape is Shape.TAGS:
            self._tags(i, path, function["name"], schema, strict)
        else:
            head = '{"name": ' + json.dumps(function["name"], ensure_ascii=False) + ', "arguments": '
            self._lines.append(f'call_{i}: {json.dumps(head, ensure_ascii=False)} args_{i} "}}"')
            self._lines.append(f"args_{i}: %json {schema_text(schema, lenient=not strict)}")
        return f"call_{i}"

    def _tags(self, i: int, path: str, name: str, schema: Mapping[str, Any], strict: bool) -> None:
        properties = schema.get("properties") or {}
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required = schema.get("required") or ()
        parts = []
        for k, (key, of) in enumerate(properties.items()):
            rule = f"value_{i}_{k}"
            where = f"{path}.parameters.properties.{key}"
            self._lines.append(self._value(rule, where, of, shared, strict))
            opened = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
            parts.append(f"({opened} {rule})" + ("" if key in required else "?"))
        opened = json.dumps(f"<function={name}>\n", ensure_ascii=False)
        self._lines.append(f'call_{i}: {opened} {" ".join(parts)} "</function>"')

    def _value(self, rule: str, where: str, schema: Any, shared: Mapping[str, Any], strict: bool) -> str:
        """With its closing tag. A string is bare text: its own characters, or one of a list."""
        end = "\n</parameter>\n"
        of = schema if isinstance(schema, dict) else {}
        if of.get("type") != "string" and "string" not in (of.get("type") or ()) and not _strings(of.get("enum")):
            return f"{rule}: %json {schema_text({**of, **shared}, lenient=not strict)} {json.dumps(end)}"
        if _strings(of.get("enum")):
            options = " | ".join(json.dumps(text + end, ensure_ascii=False) for text in of["enum"])
            return f"{rule}: {options}"
        held = next((key for key in _BARE_ONLY if key in of), None)
        if strict and held is not None:
            told = f"{where}.{held}: strings are bare text in this model's calls, which cannot be held to it"
            raise Unsupported(told, param=f"{where}.{held}")
        return f"{rule}[suffix={json.dumps(end)}]: /(.|\\n)*/"


def schema_text(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """A JSON schema inside a Lark grammar, on one line."""
    options = {"lenient": lenient, "whitespace_pattern": JSON_SPACE}
    return json.dumps({**schema, "x-guidance": options})


def _strings(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) for v in values)
