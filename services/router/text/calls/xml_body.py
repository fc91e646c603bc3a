"""Calls as tags: <function=NAME><parameter=KEY>value</parameter>…</function>, as Qwen's coders and Nemotron 3 write them.

Values are bare text: the tool's schema says which are strings and which are JSON. A string goes out as it comes.
"""

import json
from typing import Any, NoReturn

from services.router.text.calls.base import Chars, Found, Malformed, Tools

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_PARAMETER_END, _FUNCTION_END = "</parameter>", "</function>"
_VALUE_ENDS = ("\n" + _PARAMETER_END, _PARAMETER_END)
_ESCAPED = {c: json.dumps(c)[1:-1] for c in map(chr, (*range(32), ord('"'), ord("\\")))}  # inside a JSON string
_MAX_NAME_CHARS = 256
_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


class XmlBody:
    def __init__(self, tools: Tools, close: str, found: Found) -> None:
        self._tools = tools
        self._close = close
        self._found = found

    def read(self) -> Chars[None]:
        """Several functions between one pair of markers are several calls."""
        tag = yield from _tag((_FUNCTION,))
        while tag == _FUNCTION:
            yield from self._call()
            tag = yield from _tag((_FUNCTION, self._close))

    def _call(self) -> Chars[None]:
        name = self._tools.check((yield from _name()))
        self._found.started(name)
        seen: set[str] = set()
        while (yield from _tag((_PARAMETER, _FUNCTION_END))) == _PARAMETER:
            key = yield from _name()
            if key in seen:
                raise Malformed(f"parameter {key!r} comes twice")
            self._found.arguments(("," if seen else "{") + json.dumps(key, ensure_ascii=False) + ":")
            seen.add(key)
            yield from self._value(self._tools.types(name, key))
        self._found.arguments("}" if seen else "{}")
        self._found.end()

    def _value(self, types: frozenset[str]) -> Chars[None]:
        """One line break after the opening tag and one before the closing tag belong to the tags."""
        live = types == {"string"}
        value: list[str] = []
        tail = ""  # may be the start of the closing tag
        c = yield
        if c == "\n":
            c = yield
        if live:
            self._found.arguments('"')
        while True:
            if not tail and c not in "\n<":
                self._keep(c, value, live)
            else:
                tail += c
                if tail in _VALUE_ENDS:
                    break
                while tail and not any(end.startswith(tail) for end in _VALUE_ENDS):
                    self._keep(tail[0], value, live)
                    tail = tail[1:]
            c = yield
        self._found.arguments('"' if live else as_json("".join(value), types))

    def _keep(self, c: str, value: list[str], live: bool) -> None:
        if live:
            self._found.arguments(_ESCAPED.get(c, c))
        else:
            value.append(c)


def as_json(text: str, types: frozenset[str]) -> str:
    """A bare value as JSON text: read as JSON, or as Python's word for it, where that gives a type that the schema allows, else
    a string."""
    words = {"true": True, "false": False, "none": None}
    word = text.strip().lower()
    try:
        value = words[word] if word in words else json.loads(text, parse_constant=_no_constant)
        if not isinstance(value, str) and _allowed(value, types):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def _allowed(value: Any, types: frozenset[str]) -> bool:
    if not types:
        return True
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _PYTHON_TYPES[t]) for t in types if t in _PYTHON_TYPES)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _tag(tags: tuple[str, ...]) -> Chars[str]:
    """One of these tags, after white space."""
    while (c := (yield)).isspace():
        pass
    text = c
    while text not in tags:
        if not any(t.startswith(text) for t in tags):
            raise Malformed(f"{text!r} in place of {' or '.join(tags)}")
        text += yield
    return text


def _name() -> Chars[str]:
    """Up to the tag's end."""
    text = ""
    while (c := (yield)) != ">":
        text += c
        if len(text) > _MAX_NAME_CHARS or c in "<\n":
            raise Malformed(f"{text!r} is no name")
    return text.strip()
