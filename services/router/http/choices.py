"""One choice of a chat answer, from the parts of its reply: a whole message, or deltas."""

import uuid
from typing import Any

from services.router.text.calls.base import CallArguments, CallBroken, CallEnded, CallStarted, Event, Reasoning, Text
from services.router.text.parsed import ReplyParser
from services.router.text.reply import Piece, TokenText

TOOL_CALLS = "tool_calls"


def finish_word(finish: str, whole_calls: int) -> str:
    """Its own word, unless the model stopped after calling tools."""
    return TOOL_CALLS if finish == "stop" and whole_calls else finish


def message(parser: ReplyParser, text: str, finish: str) -> tuple[dict[str, Any], str]:
    """The assistant's message and its finish reason."""
    if parser.plain:
        return {"role": "assistant", "content": text, "refusal": None}, finish
    answer: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for event in [*parser.push(text), *parser.finish()]:
        match event:
            case Text(more):
                answer.append(more)
            case Reasoning(more):
                reasoning.append(more)
            case CallStarted(name):
                calls.append(new_call(name))
            case CallArguments(more):
                calls[-1]["function"]["arguments"] += more
            case CallBroken():
                calls.pop()
            case CallEnded():
                pass
    content = "".join(answer)
    told: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    if reasoning:
        told["reasoning_content"] = "".join(reasoning)
    if calls:
        told["tool_calls"] = calls
    return told, finish_word(finish, len(calls))


class Deltas:
    """Of one choice of a stream. Tokens wait for the text they belong to."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self._whole_calls = 0
        self._index = -1  # of the call that started last
        self._begun = False
        self._tokens: list[TokenText] = []

    def push(self, piece: Piece) -> tuple[dict[str, Any], tuple[TokenText, ...], str | None] | None:
        """What to send now: a delta, its tokens, the finish reason; None = nothing yet."""
        events = self._parser.push(piece.text)
        if piece.finish is not None:
            events += self._parser.finish()
        self._tokens += piece.tokens
        first, self._begun = not self._begun, True
        delta = self._delta(events)
        if first:
            delta = {"role": "assistant"} | ({} if delta else {"content": ""}) | delta
        if not delta and piece.finish is None:
            return None
        tokens, self._tokens = tuple(self._tokens), []
        finish = None if piece.finish is None else finish_word(piece.finish, self._whole_calls)
        return delta, tokens, finish

    def _delta(self, events: list[Event]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Text(more):
                    delta["content"] = delta.get("content", "") + more
                case Reasoning(more):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + more
                case CallStarted(name):
                    self._index += 1
                    calls.append({"index": self._index} | new_call(name))
                case CallArguments(more):
                    if not calls or calls[-1]["index"] != self._index:
                        calls.append({"index": self._index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += more
                case CallEnded():
                    self._whole_calls += 1
                case CallBroken():
                    pass  # what was sent of it cannot be taken back; its text follows as content
        return delta | ({"tool_calls": calls} if calls else {})


def new_call(name: str) -> dict[str, Any]:
    """One without arguments yet."""
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}
