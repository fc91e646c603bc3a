"""`twinflow bench handoff`: real workers on CPU, from its command line to its lines and its file."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli.bench_handoff import STREAMED, Kind, lines
from services.cli.bench_pair import room, workers
from services.cli.main import build_parser, main
from tests.models.tiny import make_checkpoint
from twinflow.bench.handoff import PlainCopy, Shot

TOKENS, CHUNK = 320, 64


def command(tmp_path: Path, *more: str) -> list[str]:
    config = make_checkpoint(tmp_path, "qwen3_5", 0) / "config.json"
    return [
        "bench", "handoff", "--model", str(config), "--load-format", "dummy", "--dtype", "float32", "--prefill-device", "cpu",
        "--decode-device", "cpu", "--tokens", str(TOKENS), "--chunk-tokens", str(CHUNK), "--rounds", "1", *more,
    ]  # fmt: skip


def parsed(tmp_path: Path) -> argparse.Namespace:
    args = build_parser().parse_args(command(tmp_path))
    args.cache_bytes = room(args)
    return args


@pytest.mark.timeout(300)
async def test_what_a_shot_tells(tmp_path: Path) -> None:
    """What is there already is not moved again."""
    async with workers(parsed(tmp_path), CHUNK) as shooter:
        prompt = shooter.fresh(TOKENS)
        whole = await shooter.shoot(prompt)
        assert (whole.blocks, whole.slots) == (5, 1)
        assert 0 <= whole.early_bytes < whole.bytes and whole.read_s > 0 and whole.tail_s > 0
        parts = dict(whole.parts)
        del parts["messages"]  # what is left: less than nothing where the first token reached the client late
        assert whole.pulls > 1 and all(s >= 0 for s in parts.values())
        assert whole.gap_s > 0 and whole.step_s > 0 and whole.transport
        begins = await shooter.shoot(prompt[: 2 * CHUNK])
        assert (begins.blocks, begins.slots) == (0, 1)
        assert (whole.bytes - begins.bytes) % 5 == 0 < begins.bytes, "five blocks of a size, and the slot"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert main(command(tmp_path, "--json", str(out))) == 0
    made = json.loads(out.read_text())
    assert [k["kind"] for k in made["kinds"]] == ["unstreamed", "one slot", STREAMED]
    unstreamed, slot, streamed = (k["shots"][0] for k in made["kinds"])
    assert unstreamed["pulls"] == slot["pulls"] == 1 < streamed["pulls"] and unstreamed["early_bytes"] == 0
    assert all(abs(sum(s["parts"].values()) - s["gap_s"]) < 1e-9 for s in (unstreamed, slot, streamed))
    assert unstreamed["bytes"] == streamed["bytes"] > slot["bytes"] > 0
    assert all(k["of_plain_copy"] > 0 for k in made["kinds"])
    assert "left after it" in capsys.readouterr().out


def test_lines_are_medians() -> None:
    shots = [
        Shot(8_000_000, 3, 1, s, 6_000_000, 2 * s, 5 * s, s, 1.0, 2, "ucx/cma", 1, {"post": s, "messages": 4 * s})
        for s in (0.001, 0.002, 0.009)
    ]
    told = "  token 2 after the prompt: post 2.00, messages 8.00 ms"
    copy = PlainCopy(alone_s=0.0015, in_row_s=0.001)
    assert lines(Kind("unstreamed", shots, copy)) == (
        "unstreamed: 8.0 MB (3 blocks, 1 slots) in 2 ranges over ucx/cma",
        (
            "  post to DONE 2.000 ms = 4.00 GB/s; a plain copy told and seen to end 1.500 ms: 0.75 of its rate (goal: 0.90); "
            "many in a row 1.000 ms each: 0.50"
        ),
        told,
    )
    shots[1] = replace(shots[1], pulls=2)
    assert (
        lines(Kind("unstreamed", shots, copy))[2] == "  NOT one read: it was read in up to 2 parts, one after the other"
    )
    assert lines(Kind(STREAMED, shots, copy))[1:] == (
        "  read before the prompt was computed 75.0%, left after it 4.00 ms (goal on NVLink: 3)",
        "  first token after 1000.0 ms, second 10.00 ms later; one decode step 2.00 ms, so 8.00 ms more (goal: 5)",
        told,
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--rounds", "0"), "--rounds 0 must be at least 1"),
        (("--tokens", "100"), "--tokens 100 must be at least 128"),
        (("--model", "nowhere/config.json"), "does not exist"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_bad_values_are_named(
    tmp_path: Path, more: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, *more)) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_cannot_start_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, "--cache-bytes", "1KiB")) == 2
    assert "prefill-0 exited" in capsys.readouterr().err
