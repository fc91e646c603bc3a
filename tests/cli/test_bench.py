"""`twinflow bench engine` from its command line to its table and its file."""

import json
from pathlib import Path

import pytest
import torch

from services.cli.main import main
from tests.models.tiny import make_checkpoint

ROWS = ["--rows", "prefill:2x70,decode:2@20", "--rounds", "1", "--steps", "2", "--step-tokens", "128"]


@pytest.fixture
def one_thread() -> None:
    """As a worker sets it."""
    torch.set_num_threads(1)


@pytest.mark.usefixtures("one_thread")
def test_a_config_is_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path, "qwen3_5", 0) / "config.json"
    out = tmp_path / "bench.json"
    command = [
        "bench",
        "engine",
        "--model",
        str(config),
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--json",
        str(out),
    ]
    assert main([*command, *ROWS, "--profile", "3"]) == 0
    made = json.loads(out.read_text())
    assert [row["row"] for row in made["rows"]] == ["prefill:2x70", "decode:2@20"]
    prefill, decode = made["rows"]
    assert prefill["tokens_per_s"] == pytest.approx(140 / prefill["seconds"])
    assert decode["tokens_per_s"] == pytest.approx(2 / decode["seconds"])
    for row in made["rows"]:
        assert row["efficiency"] == pytest.approx(row["floor_s"] / row["seconds"])
        assert row["profile"]["kernels"]
    assert made["rates"]["copy_bytes_per_s"] > 0 and made["engine"]["load_format"] == "dummy"
    text = capsys.readouterr().out
    assert "prefill:2x70" in text and "FLOP/s" in text
    assert text.count("busy") == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rows", "prefill:9"], "row 'prefill:9' is neither"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--model", "nowhere/at/all/config.json"], "does not exist"),
    ],
)
def test_bad_values_are_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--model", "models/twinflow-tiny", "--device", "cpu", *argv]) == 2
    assert message in capsys.readouterr().err
