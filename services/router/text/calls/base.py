"""What a parser finds in a reply, and what it needs to know of the tools."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Chars = Generator[None, str, T]  # takes a character at a time


@dataclass(frozen=True, slots=True)
class Text:
    """Of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of an offered tool. Its arguments follow, then its end."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments' JSON text, of the call that started last."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """Its arguments are a whole JSON object."""


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The call that started last is none: malformed, or cut off. What the model wrote comes back as text."""


Event = Text | Reasoning | CallStarted | CallArguments | CallEnded | CallBroken


class Malformed(Exception):
    """The text inside a call's markers is no call."""


class Tools:
    """The tools of one request, by name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """As in OpenAI's API: {"type": "function", "function": {"name", "parameters"}}."""
        self._schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}

    def check(self, name: Any) -> str:
        """Raises Malformed unless a tool of this name was offered."""
        if not isinstance(name, str) or name not in self._schemas:
            raise Malformed(f"no tool named {name!r}")
        return name

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """JSON types that a parameter may have; empty = the schema does not say."""
        properties = self._schemas[name].get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        return _types(schema) if isinstance(schema, dict) else frozenset({"string"})


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    told = schema.get("type")
    found = {told} if isinstance(told, str) else set(told) if isinstance(told, list) else set()
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            if isinstance(option, dict):
                found |= _types(option)
    return frozenset(t for t in found if isinstance(t, str))


class Found:
    """What a body has found since it was last asked. Arguments come in characters and are joined here."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arguments: list[str] = []
        self.calling = False  # a call has started and not ended
        self.settled = 0  # grows when what was read so far can no more break

    def started(self, name: str) -> None:
        self._events.append(CallStarted(name))
        self.calling = True

    def arguments(self, text: str) -> None:
        self._arguments.append(text)

    def end(self) -> None:
        self._flush()
        self._events.append(CallEnded())
        self.calling = False
        self.settle()

    def settle(self) -> None:
        self.settled += 1

    def take(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        if self._arguments:
            self._events.append(CallArguments("".join(self._arguments)))
            self._arguments.clear()


class Body(Protocol):
    """The inside of one pair of markers, for one block of calls."""

    def read(self) -> Chars[None]:
        """Ends after the closing marker. Raises Malformed."""
        ...
