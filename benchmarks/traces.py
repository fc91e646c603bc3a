"""Public request traces as synthetic prompts: a prefix that two requests of the trace share is shared, token by token.

Both formats name a prompt by ids of 512-token prefix blocks. A block becomes its id, 512 times; the last one is cut to the
prompt's length. What a reply said is not in the traces: replies get ids of their own.

    Mooncake        one prompt per line, in order of arrival
    agent sessions  a line per turn with what is new in it; a turn's prompt is all of the session before it, replies included
"""

import heapq
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TRACE_BLOCK_TOKENS = 512
REPLY_IDS = 1 << 31  # replies' ids start here
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Request:
    """`prompt` and `reply` are packed ids; `reply` is empty where the trace says nothing of how conversations go on."""

    prompt: bytes
    reply: bytes = b""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES


def load(path: Path, limit: int | None = None) -> list[Request]:
    """Raises ValueError for a file in neither format."""
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    if not rows or "hash_ids" not in rows[0]:
        raise ValueError(f"{path} is no trace of hash_ids")
    sessions = "session_id" in rows[0]
    requests = list(_sessions(rows) if sessions else map(_prompt, rows))
    return requests[:limit]


def _tokens(id: int, count: int = TRACE_BLOCK_TOKENS) -> bytes:
    return struct.pack("<I", id) * count


def _prompt(row: dict) -> Request:
    packed = b"".join(map(_tokens, row["hash_ids"]))
    return Request(packed[: row["input_length"] * TOKEN_BYTES])


def _sessions(rows: list[dict]) -> Iterator[Request]:
    """Turns of all sessions by time: a turn starts `delay` milliseconds after the one before it."""
    turns: dict[str, list[dict]] = {}
    for row in rows:
        turns.setdefault(row["session_id"], []).append(row)
    due = [(rows[0].get("timestamp", 0.0), name, 0) for name, rows in turns.items()]
    heapq.heapify(due)
    history = dict.fromkeys(turns, b"")
    replies = 0
    while due:
        now, name, index = heapq.heappop(due)
        row = turns[name][index]
        prompt = history[name] + _prompt(row).prompt
        reply = _tokens(REPLY_IDS + replies, row["output_length"])
        replies += 1
        yield Request(prompt, reply)
        history[name] = prompt + reply
        if index + 1 < len(turns[name]):
            heapq.heappush(due, (now + turns[name][index + 1].get("delay", 0.0), name, index + 1))
