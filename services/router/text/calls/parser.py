"""Finds calls between their markers in a growing reply. No character of the answer is lost: what only looks like a call, or is
malformed, comes back as text."""

from services.router.text.calls.base import CallArguments, CallBroken, Chars, Event, Found, Malformed, Text, Tools
from services.router.text.calls.formats import CallFormat
from services.router.text.marker import Marker

MAX_BROKEN = (
    32  # blocks of one reply; what follows is text. Each is looked at again from its end, which must not add up.
)
_SPACE = " \t\r\n"  # around calls; it is no part of the answer


class CallParser:
    """Of one reply. Of a call that breaks after it has started, `CallBroken` and its whole text come."""

    def __init__(self, form: CallFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._open = Marker(form.open, _SPACE)
        self._found = Found()
        self._reading: Chars[None] | None = None  # inside a pair of markers
        self._raw: list[str] = []  # what the model wrote since the opening marker, or since the last whole call
        self._after_call = False  # nothing but white space came since
        self._broken = 0

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        rest: str | None = text
        while rest:
            rest = self._outside(rest, events) if self._reading is None else self._inside(rest, events)
        return _joined(events)

    def finish(self) -> list[Event]:
        """The reply has ended."""
        events: list[Event] = []
        while self._reading is not None:
            events += self.push(self._give_up(events, ""))
        held = self._open.finish()
        if held:
            events.append(Text(held))
        return _joined(events)

    def _outside(self, text: str, events: list[Event]) -> str | None:
        if self._broken > MAX_BROKEN:
            events.append(Text(self._open.finish() + text))
            return None
        if self._after_call:
            text = text.lstrip(_SPACE)
            self._after_call = not text
        safe, rest = self._open.push(text)
        if safe:
            events.append(Text(safe))
        if rest is not None:
            self._reading = self._form.body(self._tools, self._found).read()
            next(self._reading)
            self._raw = [self._open.dropped, self._form.open]
        return rest

    def _inside(self, text: str, events: list[Event]) -> str | None:
        """Returns what follows the block, or what must be looked at again."""
        assert self._reading is not None
        settled = self._found.settled
        for i, c in enumerate(text):
            self._raw.append(c)
            try:
                self._reading.send(c)
            except StopIteration:
                events += self._found.take()
                self._reading, self._after_call = None, True
                return text[i + 1 :]
            except Malformed:
                events += self._found.take()
                return self._give_up(events, text[i + 1 :])
            if self._found.settled > settled:
                settled, self._raw = self._found.settled, []
        events += self._found.take()
        return None

    def _give_up(self, events: list[Event], rest: str) -> str:
        """What was read is text, up to the closing marker if it has come; the rest is looked at again."""
        raw, close = "".join(self._raw), self._form.close
        end = raw.find(close) + len(close) if close and close in raw else len(raw)
        if self._found.calling:
            events.append(CallBroken())
        if raw[:end].strip(_SPACE):
            events.append(Text(raw[:end]))
        self._reading, self._raw, self._found = None, [], Found()
        self._broken += 1
        return raw[end:] + rest


def _joined(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of arguments, and of text, as one."""
    out: list[Event] = []
    parts: list[str] = []
    kind: type[Text] | type[CallArguments] | None = None
    for event in [*events, None]:
        if kind is not None and type(event) is not kind:
            out.append(kind("".join(parts)))
            parts, kind = [], None
        if isinstance(event, Text | CallArguments):
            kind = type(event)
            parts.append(event.text)
        elif event is not None:
            out.append(event)
    return out
