"""Output items of /v1/responses from the parts of a reply, with the events that a stream tells of them."""

import uuid
from dataclasses import dataclass, field
from typing import Any

from services.router.text.calls.base import CallArguments, CallBroken, CallEnded, CallStarted, Event, Reasoning, Text

Told = dict[str, Any]  # one event, without its sequence number

_DELTA = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True)
class _Open:
    kind: str
    item: dict[str, Any]
    text: list[str] = field(default_factory=list)


class ResponseItems:
    """Of one reply. An item is open until another begins; the last one ends with the reply."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self.broken: list[dict[str, Any]] = []  # calls that turned out to be none
        self._open: _Open | None = None

    def push(self, events: list[Event]) -> list[Told]:
        told: list[Told] = []
        for event in events:
            match event:
                case Text(text):
                    told += self._add("message", text)
                case Reasoning(text):
                    told += self._add("reasoning", text)
                case CallArguments(text):
                    told += self._add("function_call", text)
                case CallStarted(name):
                    told += self._begin("function_call", call_item(name))
                case CallEnded():
                    told += self.end("completed")
                case CallBroken():
                    assert self._open is not None
                    self.broken.append(self._open.item)
                    told += self.end("incomplete")
        return told

    def end(self, status: str) -> list[Told]:
        """Closes the open item, if there is one."""
        if self._open is None:
            return []
        open, self._open = self._open, None
        text, item = "".join(open.text), open.item
        item["status"] = status
        at = self._at(item)
        if open.kind == "function_call":
            item["arguments"] = text
            told = [{"type": f"{_DELTA[open.kind]}.done", **at, "name": item["name"], "arguments": text}]
        else:
            part = _part(open.kind, text)
            item["content"] = [part]
            done = {"type": f"{_DELTA[open.kind]}.done", **at, "content_index": 0, "text": text}
            if open.kind == "message":
                done["logprobs"] = []
            told = [done, {"type": "response.content_part.done", **at, "content_index": 0, "part": part}]
        return [*told, {"type": "response.output_item.done", "output_index": at["output_index"], "item": item}]

    def _add(self, kind: str, text: str) -> list[Told]:
        told = [] if self._open is not None and self._open.kind == kind else self._begin(kind, _item(kind))
        assert self._open is not None
        self._open.text.append(text)
        delta: Told = {"type": f"{_DELTA[kind]}.delta", **self._at(self._open.item), "delta": text}
        if kind != "function_call":
            delta["content_index"] = 0
        if kind == "message":
            delta["logprobs"] = []
        return [*told, delta]

    def _begin(self, kind: str, item: dict[str, Any]) -> list[Told]:
        told = self.end("completed")
        self.output.append(item)
        self._open = _Open(kind, item)
        at = self._at(item)
        told.append({"type": "response.output_item.added", "output_index": at["output_index"], "item": dict(item)})
        if kind != "function_call":
            told.append({"type": "response.content_part.added", **at, "content_index": 0, "part": _part(kind, "")})
        return told

    def _at(self, item: dict[str, Any]) -> dict[str, Any]:
        """The open item is the last one."""
        return {"item_id": item["id"], "output_index": len(self.output) - 1}


def call_item(name: str) -> dict[str, Any]:
    ids = {"id": f"fc_{uuid.uuid4().hex}", "call_id": f"call_{uuid.uuid4().hex[:24]}"}
    return {"type": "function_call", **ids, "name": name, "arguments": "", "status": "in_progress"}


def _item(kind: str) -> dict[str, Any]:
    if kind == "message":
        id = f"msg_{uuid.uuid4().hex}"
        return {"type": kind, "id": id, "role": "assistant", "content": [], "status": "in_progress"}
    return {"type": kind, "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": [], "status": "in_progress"}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}
