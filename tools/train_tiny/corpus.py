"""Reads the two text files and says what is held out. The pipeline is corpus → chats → rows → train → evaluate.

Held-out choices depend only on a hash of the text, never on order or on a random seed, so that training and evaluation
(which run on different machines) agree without sharing a list.
"""

import hashlib
import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END_OF_BOOK = "<|endoftext|>\n"  # the line between two books in books.txt.xz
HELD_OUT_BOOK_ONE_IN = 20
HELD_OUT_DIALOG_ONE_IN = 20


@dataclass(frozen=True, slots=True)
class Book:
    title: str  # "Author / Title"
    text: str  # raw, title line included

    @property
    def held_out(self) -> bool:
        return stable_hash(self.title) % HELD_OUT_BOOK_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class Dialog:
    topic: str  # "coffee" or "arithmetic"
    messages: list[dict[str, Any]]  # OpenAI chat messages

    @property
    def held_out(self) -> bool:
        """By the first user message, so that two dialogs with the same opening never straddle the split."""
        opening = re.sub(r"[^a-z0-9]+", " ", self.messages[0]["content"].lower()).strip()
        return stable_hash(opening) % HELD_OUT_DIALOG_ONE_IN == 0


def stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def read_books(folder: Path) -> list[Book]:
    with lzma.open(folder / "books.txt.xz", "rt", encoding="utf-8", newline="") as f:
        texts = f.read().split(END_OF_BOOK)
    return [Book(text.lstrip().split("\n", 1)[0].removeprefix("# ").strip(), text) for text in texts if text.strip()]


def read_dialogs(folder: Path) -> Iterator[Dialog]:
    with lzma.open(folder / "dialogs.jsonl.xz", "rt", encoding="utf-8") as f:
        for line in f:
            raw = json.loads(line)
            yield Dialog(raw["topic"].lower(), [_openai_message(m, i) for i, m in enumerate(raw["messages"])])


def _openai_message(raw: dict[str, Any], index: int) -> dict[str, Any]:
    if call := raw.get("tool_call"):
        tool_call = {"id": f"call_{index}", "type": "function", "function": dict(call)}
        return {"role": "assistant", "content": None, "tool_calls": [tool_call]}
    message = {"role": raw["role"], "content": raw["content"].strip()}
    if raw["role"] == "tool":
        message["tool_call_id"] = f"call_{index - 1}"  # a tool answer always follows its call
    return message


def known_tools(dialogs: list[Dialog]) -> list[dict[str, Any]]:
    """OpenAI tool list of the coffee shop: names, argument types and which arguments are always given."""
    seen: dict[str, list[dict[str, Any]]] = {}
    for dialog in dialogs:
        for message in dialog.messages:
            for call in message.get("tool_calls", ()):
                seen.setdefault(call["function"]["name"], []).append(call["function"]["arguments"])
    return [_tool(name, seen[name]) for name in sorted(seen)]


def _tool(name: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    json_type = {str: "string", list: "array"}
    properties: dict[str, dict[str, str]] = {}
    for arguments in calls:
        for key, value in arguments.items():
            properties.setdefault(key, {"type": json_type[type(value)]})
    required = [key for key in properties if all(key in arguments for arguments in calls)]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": _sentence(name), "parameters": parameters}}


def _sentence(name: str) -> str:
    words = name.replace("_", " ")
    return words[0].upper() + words[1:] + "."
