"""The demo's table: what a row says of a remote and of a local request, and that columns line up."""

import pytest

from services.cli.demo_table import COLUMNS, Measured, cells, positions, table

REMOTE = Measured(
    "1 long",
    (0.5, 0.52, 0.9),
    41,
    {
        "prompt_tokens": 612,
        "route": "remote",
        "reason": "612 tokens to compute",
        "decode_attention_tokens": 64,
        "prefill_attention_tokens": 128,
        "prefill_checkpoints": [64, 128],
        "blocks_moved": 9,
        "slots_moved": 1,
        "bytes_moved": 3 << 20,
        "transfer_s": 0.003,
        "transport": "shm",
    },
)
LOCAL = Measured("2 turn", (0.0123,), 1, {"prompt_tokens": 700, "route": "local", "decode_checkpoints": [1, 2, 3, 4]})


def named(row: Measured) -> dict[str, str]:
    names = ["label", "prompt", "d_attn", "d_points", "p_attn", "p_points", "route", "blocks", "slots"]
    return dict(zip([*names, "mib", "rate", "over", "ttft", "gap", "tpot"], cells(row), strict=True))


def test_remote_row() -> None:
    row = named(REMOTE)
    assert row["prompt"] == "612"
    assert (row["d_attn"], row["d_points"], row["p_attn"], row["p_points"]) == ("64", "none", "128", "64, 128")
    assert (row["blocks"], row["slots"], row["mib"], row["rate"], row["over"]) == ("9", "1", "3.00", "1000", "shm")
    assert (row["ttft"], row["gap"], row["tpot"]) == ("500", "20.0", "10.0")


def test_local_row_moves_nothing() -> None:
    row = named(LOCAL)
    assert [row[k] for k in ("p_attn", "p_points", "blocks", "slots", "mib", "rate", "over")] == ["-"] * 7
    assert (row["d_points"], row["ttft"], row["gap"], row["tpot"]) == ("…, 2, 3, 4", "12.3", "-", "-")


def test_no_statistics_are_question_marks() -> None:
    assert named(Measured("x", (), 0))["prompt"] == "?"


def test_columns_line_up_under_their_group() -> None:
    lines = table([REMOTE, LOCAL])
    groups, heads, rule, first = lines[:4]
    assert groups.index("decode had") == heads.index("attn")
    assert groups.index("moved") == heads.index("blocks")
    assert [len(dashes) for dashes in rule.split()] == [max(len(h), len(a), len(b)) for h, a, b in columns()]
    assert first.startswith("1 long")
    assert lines[-1] == "  1 long: 612 tokens to compute"


def columns() -> list[tuple[str, str, str]]:
    return list(zip([name for _, name in COLUMNS], cells(REMOTE), cells(LOCAL), strict=True))


@pytest.mark.parametrize(("given", "shown"), [((), "none"), ((5,), "5"), ((1, 2, 3), "1, 2, 3")], ids=str)
def test_positions(given: tuple[int, ...], shown: str) -> None:
    assert positions(given) == shown
