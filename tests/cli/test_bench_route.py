"""`twinflow bench route` from the command line: a table, JSON, and errors that name the option."""

import json
from pathlib import Path

import pytest

from services.cli.main import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 100 * i, "input_length": 1500 + i, "output_length": 4, "hash_ids": [0, 1, 10 + i]}
        for i in range(40)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_per_load_and_policy(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = [
        "--prefill",
        "2",
        "--decode",
        "3",
        "--loads",
        "0.5,1",
        "--policies",
        "cost,round_robin",
        "--json",
        str(out),
    ]
    assert main(["bench", "route", "--trace", str(trace), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("trace.jsonl: 40 requests") and lines[0].endswith("2P3D")
    assert [line.split()[:2] for line in lines[2:]] == [
        [x, p] for x in ("0.50", "1.00") for p in ("cost", "round_robin")
    ]
    told = json.loads(out.read_text())
    assert [(r["load"], r["policy"]) for r in told["rows"]] == [
        (x, p) for x in (0.5, 1.0) for p in ("cost", "round_robin")
    ]
    assert told["setup"]["prefill"] == 2 and told["targets"] == {"ttft_s": 1.0, "tpot_s": 0.025}
    for row in told["rows"]:
        assert row["requests"] == 36 and 0 < row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"]
        assert 0 <= row["good"] <= 1 - row["shed"] / row["requests"]


def test_parts_are_averaged_and_compared_with_the_first_policy(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = ["--limit", "20", "--parts", "3", "--loads", "1", "--policies", "cost,round_robin", "--json", str(out)]
    assert main(["bench", "route", "--trace", str(trace), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("trace.jsonl: 3 parts of 20 requests") and lines[1].endswith("against cost")
    assert "±" not in lines[2] and lines[3].count("±") == 2 and lines[3].endswith("points")
    cost, other = json.loads(out.read_text())["rows"]
    for row in (cost, other):
        parts = [part["ttft_p90_ms"] for part in row["parts"]]
        assert len(parts) == 3 and row["ttft_p90_ms"] == pytest.approx(sum(parts) / 3)
    pairs = zip(other["parts"], cost["parts"], strict=True)
    ratios = [a["ttft_p90_ms"] / b["ttft_p90_ms"] - 1 for a, b in pairs]
    assert other["against"]["ttft_p90"][0] == pytest.approx(sum(ratios) / 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "best"], "unknown policy 'best'"),
        (["--loads", "0"], "--loads 0.0 must be more than 0"),
        (["--rates-off", "1.5"], "--rates-off 1.5"),
        (["--prefill", "0"], "--prefill 0 must be more than 0"),
        (["--copies", "61"], "copies=61"),
        (["--parts", "0"], "--parts 0 must be more than 0"),
    ],
    ids=lambda v: v[0].strip("-") if isinstance(v, list) else "",
)
def test_bad_options_are_named(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["bench", "route", "--trace", str(trace), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_trace_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "route", "--trace", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
