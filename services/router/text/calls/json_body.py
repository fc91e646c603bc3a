"""Calls as JSON between markers: {"name": …, "arguments": {…}}, one or a list of them."""

import json
from typing import Any, NoReturn

from services.router.text.calls.base import Chars, Found, Malformed, Tools


class JsonBody:
    """Arguments go out as they come, in the model's own spelling; a call ends only when they are valid JSON."""

    def __init__(self, tools: Tools, close: str, found: Found) -> None:
        """`close` "" = the calls end with their JSON."""
        self._tools = tools
        self._close = close
        self._found = found

    def read(self) -> Chars[None]:
        c = yield from _space()
        if c == "[":
            c = yield from _space()
            while True:
                yield from self._call(c)
                c = yield from _space()
                if c == "]":
                    break
                _expect(c, ",")
                c = yield from _space()
        else:
            yield from self._call(c)
        self._found.settle()
        if self._close:
            c = yield from _space()
            for i, wanted in enumerate(self._close):
                _expect(c, wanted)
                if i + 1 < len(self._close):
                    c = yield

    def _call(self, c: str) -> Chars[None]:
        """One object; `c` is its first character."""
        _expect(c, "{")
        name: str | None = None
        early = ""  # arguments that came before the name
        begun = False
        c = yield from _space()
        while c != "}":
            _expect(c, '"')
            key = yield from _string()
            _expect((yield from _space()), ":")
            c = yield from _space()
            if key == "name" and name is None:
                _expect(c, '"')
                name = self._tools.check((yield from _string()))
                self._found.started(name)
                if early:
                    self._found.arguments(early)
            elif key == "arguments" and not begun:
                begun = True
                early = yield from self._arguments(c, live=name is not None)
            else:
                c = yield from _other(c)
                if c not in ",}":
                    raise Malformed(f"{c!r} after a value")
                c = c if c == "}" else (yield from _space())
                continue
            c = yield from _space()
            if c != "}":
                _expect(c, ",")
                c = yield from _space()
        if name is None:
            raise Malformed("no name")
        if not begun:
            self._found.arguments("{}")
        self._found.end()

    def _arguments(self, c: str, live: bool) -> Chars[str]:
        """An object, or a string with one inside. Sent as it comes when `live`; returns its text."""
        if c == '"':
            text = yield from _string()
        else:
            _expect(c, "{")
            text = yield from _nested(c, self._found if live else None)
        if not isinstance(_loads(text), dict):
            raise Malformed("the arguments are no object")
        if live and c == '"':
            self._found.arguments(text)
        return text


def _space() -> Chars[str]:
    """The first character that is no white space."""
    while (c := (yield)).isspace():
        pass
    return c


def _string() -> Chars[str]:
    """Behind the opening quote."""
    raw: list[str] = []
    while (c := (yield)) != '"':
        raw.append(c)
        if c == "\\":
            raw.append((yield))
    value = _loads('"' + "".join(raw) + '"')
    assert isinstance(value, str)
    return value


def _nested(first: str, found: Found | None) -> Chars[str]:
    """An object or list with everything in it, as written, told to `found` at once; its end is found by counting brackets
    outside strings."""
    text, depth, quoted, escaped = [first], 1, False, False
    if found is not None:
        found.arguments(first)
    while depth:
        c = yield
        text.append(c)
        if found is not None:
            found.arguments(c)
        if escaped:
            escaped = False
        elif quoted and c == "\\":
            escaped = True
        elif c == '"':
            quoted = not quoted
        elif not quoted:
            depth += (c in "{[") - (c in "}]")
    return "".join(text)


def _other(c: str) -> Chars[str]:
    """A value that does not matter here, an id for example; returns the character after it."""
    if c == '"':
        yield from _string()
        return (yield from _space())
    if c in "{[":
        _loads((yield from _nested(c, None)))
        return (yield from _space())
    text = c
    while (c := (yield)) not in ",}" and not c.isspace():
        text += c
    _loads(text)
    return (yield from _space()) if c.isspace() else c


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise Malformed(str(e)) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _expect(c: str, wanted: str) -> None:
    if c != wanted:
        raise Malformed(f"{c!r} in place of {wanted!r}")
