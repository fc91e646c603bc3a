"""A reply's text taken apart: thoughts, answer, tool calls. Without either of the two it passes through untouched."""

from services.router.text.calls.base import Event, Reasoning, Text, Tools
from services.router.text.calls.formats import CallFormat
from services.router.text.calls.parser import CallParser
from services.router.text.reasoning import ReasoningSplitter


class ReplyParser:
    """Of one reply."""

    def __init__(self, splitter: ReasoningSplitter | None = None, calls: CallParser | None = None) -> None:
        self._splitter = splitter
        self._calls = calls

    @property
    def plain(self) -> bool:
        """All text is the answer's, as it comes."""
        return self._splitter is None and self._calls is None

    def push(self, text: str) -> list[Event]:
        if self._splitter is None:
            return self._answer(text)
        reasoning, answer = self._splitter.push(text)
        return [*([Reasoning(reasoning)] if reasoning else []), *self._answer(answer)]

    def finish(self) -> list[Event]:
        """What was held back, at the reply's end."""
        reasoning, answer = self._splitter.finish() if self._splitter is not None else ("", "")
        events: list[Event] = [Reasoning(reasoning)] if reasoning else []
        events += self._answer(answer)
        return events + (self._calls.finish() if self._calls is not None else [])

    def _answer(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Text(text)] if self._calls is None else self._calls.push(text)


def reply_parser(form: CallFormat | None, tools: Tools | None, thinks: bool, inside: bool) -> ReplyParser:
    """`tools` None = the request offers none. `inside`: the prompt has opened the thoughts."""
    calls = CallParser(form, tools) if form is not None and tools is not None else None
    return ReplyParser(ReasoningSplitter(inside) if thinks else None, calls)
