"""Traces become prompts whose shared prefixes are shared; all else is not."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from services.router.bench.prompt import Run, RunPrompt
from services.router.bench.trace import read_trace
from services.router.view.prompt import PromptKeys
from tests.router.view.test_index import RECORD
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.hashing import pack_tokens


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_prompt_hashes_as_its_tokens_do() -> None:
    runs = [Run(7, 5), Run(9, 6), Run(7, 3)]
    ids = [7] * 5 + [9] * 6 + [7] * 3
    plain, made = PromptKeys(pack_tokens(ids)), RunPrompt(runs, RECORD.fingerprint, RECORD.block_tokens)
    assert made.tokens == len(ids) and made.root("") != b""
    assert made.block_hashes(RECORD) == plain.block_hashes(RECORD)
    assert made.block_keys(RECORD).tolist() == plain.block_keys(RECORD).tolist()
    assert made.tail_keys(RECORD, range(1, 14)).tolist() == plain.tail_keys(RECORD, range(1, 14)).tolist()
    longer = RunPrompt([*runs, Run(1, 9)], RECORD.fingerprint, RECORD.block_tokens, made)
    assert longer.block_hashes(RECORD) == PromptKeys(pack_tokens(ids + [1] * 9)).block_hashes(RECORD)


def test_mooncake(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * i, "input_length": 700, "output_length": 5 + i, "hash_ids": [0, i]} for i in range(3)]
    sessions = read_trace(write(tmp_path / "t.jsonl", rows))
    assert [s.start_s for s in sessions] == [0, 1, 2]
    assert [(t.new, t.reply_tokens) for s in sessions for t in s.turns] == [
        ((Run(0, 512), Run(i, 188)), 5 + i) for i in range(3)
    ]
    assert len({t.reply_id for s in sessions for t in s.turns}) == 3


def conversation(tmp_path: Path, *rows: tuple[int, int, list[int]]) -> list[tuple[Run, ...]]:
    """Prompts of (prompt tokens, reply tokens, blocks)."""
    made = [
        {"timestamp": 1000 * i, "input_length": n, "output_length": reply, "hash_ids": ids}
        for i, (n, reply, ids) in enumerate(rows)
    ]
    return [s.turns[0].new for s in read_trace(write(tmp_path / "t.jsonl", made))]


REPLY = 1 << 25  # ids of replies begin behind it


def test_the_next_turn_begins_with_the_turn_before_and_its_reply(tmp_path: Path) -> None:
    """Blocks 0 and 1 are whole in the first prompt, 100 tokens follow in block 2 and a reply of 50."""
    first, second, third = conversation(
        tmp_path, (1124, 50, [0, 1, 2]), (1700, 60, [0, 1, 3, 4]), (2300, 5, [0, 1, 3, 5, 6])
    )
    assert first == (Run(0, 512), Run(1, 512), Run(2, 100))
    assert second == (Run(0, 512), Run(1, 512), Run(2, 100), Run(REPLY + 1, 50), Run(3, 362), Run(4, 164))
    assert third[:5] == second[:5]
    assert third[5:] == (Run(4, 164), Run(REPLY + 2, 60), Run(5, 288), Run(6, 252))


@pytest.mark.parametrize(
    "row",
    [(1150, 5, [0, 1, 3]), (1700, 5, [0, 4, 5, 6]), (2000, 5, [9, 1, 3, 4])],
    ids=["too short for the reply", "parts before the end", "another beginning"],
)
def test_what_only_shares_a_beginning_is_no_next_turn(tmp_path: Path, row: tuple[int, int, list[int]]) -> None:
    _, second = conversation(tmp_path, (1124, 50, [0, 1, 2]), row)
    assert all(run.token_id < REPLY for run in second) and sum(run.tokens for run in second) == row[0]
    assert [run.token_id for run in second] == row[2]


def test_of_many_prompts_behind_one_beginning_none_goes_on_with_another(tmp_path: Path) -> None:
    """Block 0 is a system prompt: it was not new when the second prompt ended with it."""
    prompts = conversation(tmp_path, (512, 5, [0]), (700, 5, [0, 1]), (800, 5, [0, 2]))
    assert prompts[2] == (Run(0, 512), Run(REPLY + 1, 5), Run(2, 283))  # of the very first one that is all there is
    assert prompts[1] == (Run(0, 512), Run(REPLY + 1, 5), Run(1, 183))


def test_sessions_keep_their_turns_together(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"session_id": "b", "timestamp": 500, "input_length": 100, "output_length": 5, "hash_ids": [2]},
        {"session_id": "a", "input_length": 50, "output_length": 7, "hash_ids": [3], "delay": 1500.0},
    ]
    a, b = read_trace(write(tmp_path / "t.jsonl", rows))
    assert [(t.new, t.delay_s) for t in a.turns] == [((Run(0, 512), Run(1, 88)), 0.0), ((Run(3, 50),), 1.5)]
    assert (b.start_s, len(b.turns)) == (0.5, 1)
    assert len(read_trace(tmp_path / "t.jsonl", limit=2)) == 1  # whole sessions


def test_copies_share_nothing(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * i, "input_length": 600, "output_length": 5, "hash_ids": [0, i]} for i in range(4)]
    sessions = read_trace(write(tmp_path / "t.jsonl", rows), copies=3)
    assert len(sessions) == 12 and [s.start_s for s in sessions] == sorted(s.start_s for s in sessions)
    firsts = [s.turns[0].new[0].token_id for s in sessions]
    assert sorted(firsts.count(id) for id in set(firsts)) == [4, 4, 4]


def test_parts_begin_later(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * i, "input_length": 600, "output_length": 5, "hash_ids": [i]} for i in range(10)]
    path = write(tmp_path / "t.jsonl", rows)
    starts = [[s.start_s for s in read_trace(path, 4, 1, part, 3)] for part in range(3)]
    assert starts == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]


def test_sessions_without_times_come_in_another_order_for_each_part(tmp_path: Path) -> None:
    rows = [
        {"session_id": i, "timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [i]} for i in range(20)
    ]
    path = write(tmp_path / "t.jsonl", rows)
    parts = [read_trace(path, None, 1, part, 2) for part in (0, 1, 0)]
    order = [[s.turns[0].new[0].token_id for s in part] for part in parts]
    assert parts[0] == parts[2] and order[0] != order[1] and sorted(order[0]) == sorted(order[1]) == list(range(20))
    assert all(a.start_s < b.start_s for part in parts for a, b in pairwise(part))


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
                    "2023-11-16 18:17:04.4799600,100,1\n")  # fmt: skip
    first, second = read_trace(path)
    assert second.start_s - first.start_s == pytest.approx(0.5)
    assert (first.turns[0].new, first.turns[0].reply_tokens) == ((Run(0, 4808),), 10)


@pytest.mark.parametrize(
    "text", ["", "{}\n", "no json\n", '{"input_length": 5}\n'], ids=["empty", "bare", "text", "part"]
)
def test_what_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(BadRequest, match=r"t\.jsonl"):
        read_trace(path)
