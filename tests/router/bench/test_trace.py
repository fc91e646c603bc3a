"""Traces become prompts whose shared prefixes are shared; all else is not."""

import json
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
