"""Public request traces as synthetic prompts: a prefix that two requests of the trace share is shared, token by token.

Both formats name a prompt by ids of 512-token prefix blocks. A block becomes its id, 512 times; the last one is cut to the
prompt's length. What a reply said is not in the traces: replies get ids of their own.

    Mooncake        one prompt per line with its time of arrival; how the conversation went on is told by later prompts alone
    agent sessions  a line per turn with what is new in it; a turn's prompt is all of the session before it, replies included
"""

import heapq
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE_BLOCK_TOKENS = 512
REPLY_IDS = 1 << 31  # replies' ids start here

Span = tuple[int, int]  # an id and how many tokens of it


@dataclass(frozen=True, slots=True)
class Service:
    """How long a request takes: measured on one H200 with a model of the shape of Qwen3.5-4B, prompts of 16k tokens and a
    decode step of 32 sequences with 8k tokens each. `hold` multiplies both: 0 = no time at all."""

    prefill_tokens_per_s: float = 58_900.0
    step_s: float = 7.2e-3
    hold: float = 1.0

    def prefill_s(self, tokens: int) -> float:
        return self.hold * tokens / self.prefill_tokens_per_s

    def decode_s(self, tokens: int) -> float:
        return self.hold * tokens * self.step_s


@dataclass(frozen=True, slots=True)
class Request:
    arrival_s: float
    spans: tuple[Span, ...]
    prompt_tokens: int
    reply: Span

    @property
    def prompt(self) -> bytes:
        """Packed ids."""
        return b"".join(struct.pack("<I", id) * count for id, count in self.spans)


def load(path: Path, limit: int | None = None, service: Service | None = None) -> list[Request]:
    """The first `limit` requests in order of arrival; `service` says when a turn of a session is over at the latest.

    Raises ValueError for a file in neither format."""
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    if not rows or "hash_ids" not in rows[0]:
        raise ValueError(f"{path} is no trace: its first line has no hash_ids")
    sessions = "session_id" in rows[0]
    requests = list(_sessions(rows, service or Service()) if sessions else _prompts(rows))
    return requests[:limit]


def _spans(row: dict) -> tuple[Span, ...]:
    ids, tokens = row["hash_ids"], row["input_length"]
    return tuple((id, min(TRACE_BLOCK_TOKENS, tokens - k * TRACE_BLOCK_TOKENS)) for k, id in enumerate(ids))


def _prompts(rows: list[dict]) -> Iterator[Request]:
    for k, row in enumerate(rows):
        reply = (REPLY_IDS + k, row["output_length"])
        yield Request(row["timestamp"] / 1e3, _spans(row), row["input_length"], reply)


def _sessions(rows: list[dict], service: Service) -> Iterator[Request]:
    """Turns of all sessions by time: a turn starts `delay` milliseconds after the one before it would be over without a
    cache."""
    turns: dict[str, list[dict]] = {}
    for row in rows:
        turns.setdefault(row["session_id"], []).append(row)
    due = [(rows[0].get("timestamp", 0.0) / 1e3, name, 0) for name, rows in turns.items()]
    heapq.heapify(due)
    history: dict[str, tuple[Span, ...]] = dict.fromkeys(turns, ())
    replies = 0
    while due:
        now, name, index = heapq.heappop(due)
        row, spans = turns[name][index], history[name] + _spans(turns[name][index])
        request = Request(now, spans, sum(n for _, n in spans), (REPLY_IDS + replies, row["output_length"]))
        replies += 1
        yield request
        history[name] = (*spans, request.reply)
        if index + 1 < len(turns[name]):
            over = now + service.prefill_s(request.prompt_tokens) + service.decode_s(row["output_length"])
            heapq.heappush(due, (over + turns[name][index + 1].get("delay", 0.0) / 1e3, name, index + 1))


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Of a cache that forgets nothing and can resume after any token: `tokens` by request, the share of all blocks of the
    trace (the last, shorter one of a prompt included) that lie in a prefix seen before, and how many tokens there are to keep
    when each prefix, with the replies, is kept once."""

    tokens: tuple[int, ...]
    block_ratio: float
    distinct_tokens: int


def ceiling(requests: Sequence[Request]) -> Ceiling:
    nodes: dict[tuple[int, int, int], int] = {}  # (node, id, tokens) → the node behind it; 0 is the root
    longest: dict[tuple[int, int], int] = {}  # (node, id) → most tokens of that id seen there
    hits, seen, total, distinct = [], 0, 0, 0
    for request in requests:
        node, tokens, known = 0, 0, True
        for id, count in (*request.spans, request.reply):
            if known and id != request.reply[0]:
                tokens += min(count, longest.get((node, id), 0))
                known = (node, id, count) in nodes
                seen += known
            kept = longest.get((node, id), 0)
            distinct += max(0, count - kept)
            longest[node, id] = max(count, kept)
            node = nodes.setdefault((node, id, count), len(nodes) + 1)
        hits.append(min(tokens, request.prompt_tokens - 1))
        total += len(request.spans)
    return Ceiling(tuple(hits), seen / total, distinct)
