"""Requests of public traces, as prompts whose shared prefixes are shared token by token.

    Mooncake        JSON lines: arrival, lengths, ids of 512-token prefix blocks
    agent sessions  the same with a session: a line is what a turn adds; its prompt is all of the session before it, replies too
    Azure           CSV: arrival and lengths; nothing is shared

A block becomes its id, 512 times. What replies said is not in the traces: they get ids of their own.

A prompt that begins with all whole blocks of an earlier one, of which the last was new then, and that is long enough for that
one's reply, is taken for the next turn of the same conversation: it begins with the whole earlier prompt and its reply, as the
prompts of real conversations do. A block whose id has been seen is what it was.
"""

import csv
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from services.router.bench.prompt import Run
from twinflow.contracts.errors import BadRequest

TRACE_BLOCK_TOKENS = 512
ID_STEP = 1 << 26  # between the ids of two copies of a trace; blocks' ids are below it
REPLY_IDS = 1 << 25  # replies' ids start here
COPIES = 60  # ids are uint32


@dataclass(frozen=True, slots=True)
class Turn:
    """`new`: tokens behind all of the session before. `delay_s`: after the end of the turn before."""

    new: tuple[Run, ...]
    reply_tokens: int
    reply_id: int
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one conversation, or a single request."""

    start_s: float
    turns: tuple[Turn, ...]


def read_trace(path: Path, limit: int | None = None, copies: int = 1, part: int = 0, parts: int = 1) -> list[Session]:
    """By time, `limit` requests at most (whole sessions), the whole of it so many times with other tokens, spread over its
    time. Of several `parts` each begins that much later in the trace; sessions that all begin at once are shuffled instead,
    another way for each part, and begin by chance. Raises BadRequest naming the file."""
    if not 1 <= copies <= COPIES:
        raise BadRequest(f"copies={copies} must lie between 1 and {COPIES}", param="copies")
    try:
        text = path.read_text(encoding="utf-8")
        sessions = _azure(text.splitlines()) if path.suffix == ".csv" else _json_lines(text.splitlines())
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BadRequest(f"cannot read the trace {path}: {type(e).__name__}: {e}", param="trace") from e
    if not sessions:
        raise BadRequest(f"the trace {path} holds no request", param="trace")
    sessions.sort(key=lambda s: s.start_s)
    if len(sessions) > 1 and sessions[0].start_s == sessions[-1].start_s:
        return list(_limited(_drawn(_copied(sessions, copies), Random(part)), limit))
    copied = _copied(sessions, copies)
    spare = max(0, sum(len(s.turns) for s in copied) - limit) if limit is not None else 0
    return list(_limited(_later(copied, spare * part // parts), limit))


def _later(sessions: Sequence[Session], requests: int) -> Sequence[Session]:
    """Without the first so many."""
    passed = accumulate(len(s.turns) for s in sessions)
    return sessions[bisect_right(list(passed), requests) :]


def _drawn(sessions: Sequence[Session], random: Random) -> list[Session]:
    """In any order, a second apart on average."""
    at_s, drawn = 0.0, []
    for session in random.sample(sessions, len(sessions)):
        at_s += random.expovariate(1.0)
        drawn.append(replace(session, start_s=at_s))
    return drawn


def _limited(sessions: Sequence[Session], limit: int | None) -> Iterator[Session]:
    requests = 0
    for session in sessions:
        requests += len(session.turns)
        if limit is not None and requests > limit:
            return
        yield session


def _copied(sessions: Sequence[Session], copies: int) -> list[Session]:
    """Copy k is late by k/copies of the mean time between two sessions."""
    gap_s = (sessions[-1].start_s - sessions[0].start_s) / max(1, len(sessions) - 1)
    made = [
        Session(
            s.start_s + k / copies * gap_s,
            tuple(replace(t, new=_shifted(t.new, k), reply_id=t.reply_id + k * ID_STEP) for t in s.turns),
        )
        for s in sessions
        for k in range(copies)
    ]
    return sorted(made, key=lambda s: s.start_s)


def _shifted(runs: Sequence[Run], copy: int) -> tuple[Run, ...]:
    return tuple(Run(r.token_id + copy * ID_STEP, r.tokens) for r in runs)


def _json_lines(lines: Sequence[str]) -> list[Session]:
    rows = [json.loads(line) for line in lines if line.strip()]
    turns: dict[Any, list[dict[str, Any]]] = {}
    for number, row in enumerate(rows):
        turns.setdefault(row.get("session_id", number), []).append(row)
    replies, sessions, conversations = REPLY_IDS, [], _Conversations()
    for of_session in turns.values():
        made = []
        for row in of_session:
            replies += 1
            reply_tokens = max(1, row["output_length"])
            alone = "session_id" not in row
            new = conversations.prompt(row, Run(replies, reply_tokens)) if alone else _blocks(row)
            made.append(Turn(new, reply_tokens, replies, row.get("delay", 0.0) / 1e3))
        sessions.append(Session(of_session[0].get("timestamp", 0.0) / 1e3, tuple(made)))
    return sessions


class _Conversations:
    """What blocks contain, by id, and whose last whole block each one was when it was new."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[Run, ...]] = {}
        self._ends: dict[int, tuple[Run, ...]] = {}  # → what followed it: the rest of the prompt and its reply

    def prompt(self, row: dict[str, Any], reply: Run) -> tuple[Run, ...]:
        left, ids = max(1, row["input_length"]), row["hash_ids"]
        whole = min(left // TRACE_BLOCK_TOKENS, len(ids))
        runs: list[Run] = []
        known = next((k for k, id in enumerate(ids) if id not in self._contents), len(ids))
        new_end = known < whole
        carried = list(self._ends.get(ids[known - 1], ())) if 0 < known < len(ids) else []
        if sum(r.tokens for r in carried) > left - known * TRACE_BLOCK_TOKENS:
            carried = []
        for k, id in enumerate(ids):
            wanted = min(TRACE_BLOCK_TOKENS, left)
            content = self._contents.get(id)
            if content is None:
                content, carried = _filled(carried, id)
                if wanted == TRACE_BLOCK_TOKENS:
                    self._contents[id] = content
            runs += _first(content, wanted)
            left -= wanted
            if k + 1 == whole:
                end = len(runs)
            if left <= 0:
                break
        if new_end:
            self._ends[ids[whole - 1]] = (*runs[end:], reply)
        return tuple(runs)


def _filled(carried: Sequence[Run], id: int) -> tuple[tuple[Run, ...], list[Run]]:
    """A block that begins with `carried` and is filled with its id, and what of `carried` is left for the next one."""
    begin = _first(carried, TRACE_BLOCK_TOKENS)
    taken = sum(r.tokens for r in begin)
    rest = [Run(id, TRACE_BLOCK_TOKENS - taken)] if taken < TRACE_BLOCK_TOKENS else []
    return (*begin, *rest), _behind(carried, taken)


def _first(runs: Sequence[Run], tokens: int) -> list[Run]:
    made = []
    for run in runs:
        if tokens <= 0:
            break
        made.append(Run(run.token_id, min(tokens, run.tokens)))
        tokens -= run.tokens
    return made


def _behind(runs: Sequence[Run], tokens: int) -> list[Run]:
    """What is left of them after so many."""
    made = []
    for run in runs:
        if tokens < run.tokens:
            made.append(Run(run.token_id, run.tokens - max(0, tokens)))
        tokens -= run.tokens
    return made


def _blocks(row: dict[str, Any]) -> tuple[Run, ...]:
    left, runs = max(1, row["input_length"]), []
    for id in row["hash_ids"]:
        runs.append(Run(id, min(left, TRACE_BLOCK_TOKENS)))
        left -= runs[-1].tokens
        if left <= 0:
            break
    return tuple(runs)


def _azure(lines: Sequence[str]) -> list[Session]:
    sessions: list[Session] = []
    for number, row in enumerate(csv.DictReader(lines)):
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        prompt = Run(number, max(1, int(row["ContextTokens"])))
        turn = Turn((prompt,), max(1, int(row["GeneratedTokens"])), REPLY_IDS + number)
        sessions.append(Session(at_s, (turn,)))
    return sessions
