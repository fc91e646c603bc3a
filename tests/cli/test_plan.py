"""`twinflow plan` from its command line to what it prints; the numbers themselves are `tests/engine/test_capacity.py`'s."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.cli.lengths import quantile, read_trace
from services.cli.main import main
from tests.models.tiny import make_checkpoint
from twinflow.contracts.errors import BadRequest
from twinflow.models import hub

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
DOCS = ROOT / "docs" / "plan.md"
QWEN_4B = str(CONFIGS / "qwen3.5-4b.json")
ON_24_GIB = ["--device-bytes", "24GiB", "--max-running", "32"]


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(plan(capsys, *argv, "--json"))
    return made


def test_the_table_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    made = as_json(capsys, QWEN_4B, *ON_24_GIB)
    assert made["usable_bytes"] == int(0.9 * 24 * 2**30)
    assert made["workspace_bytes"] == sum(term["size_bytes"] for term in made["workspace"])
    arena = made["arena"]
    assert made["usable_bytes"] - made["weights_bytes"] - made["workspace_bytes"] - arena["total_bytes"] in range(256)
    used = arena["blocks"] * arena["block_bytes"] + arena["slot_floor"] * arena["slot_bytes"]
    assert used + arena["unused_bytes"] == arena["total_bytes"]
    assert made["capacity_tokens"] == arena["blocks"] * made["block_tokens"]
    text = plan(capsys, QWEN_4B, *ON_24_GIB)
    assert f"{made['capacity_tokens']:,} tokens of attention KV, 32,768 B each" in text
    assert all(option in text for option in made["options"])


def test_its_options_start_a_worker_that_holds_it(capsys: pytest.CaptureFixture[str]) -> None:
    from services.decode.config import load
    from twinflow.cache.arena import ArenaGeometry
    from twinflow.models.loader import describe_layout

    made = as_json(capsys, QWEN_4B, *ON_24_GIB, "--block-tokens", "32", "--state-dtype", "bfloat16")
    engine = load(["--model", "somewhere", *made["options"]]).engine
    layout = describe_layout(
        json.loads(Path(QWEN_4B).read_text()),
        dtype=engine.dtype,
        block_tokens=engine.block_tokens,
        state_dtype=engine.state_dtype,
    )
    geometry = ArenaGeometry.split(layout, engine.cache_bytes, engine.max_running + engine.checkpoint_slots)
    assert {name: made["arena"][name] for name in ("total_bytes", "block_bytes", "slot_bytes", "blocks", "slots")} == {
        name: getattr(geometry, name) for name in ("total_bytes", "block_bytes", "slot_bytes", "blocks", "slots")
    }


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_worker_started_with_its_options_has_these_pools(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, role: str
) -> None:
    """From the command's output through the service's own settings to an engine that has loaded the model and served."""
    from services.decode import config as decode
    from services.prefill import config as prefill
    from twinflow.contracts.workers import Role
    from twinflow.engine.build import build_engine

    folder = str(make_checkpoint(tmp_path, "qwen3_5", 0))
    sizes = ["--cache-bytes", "5MB", "--max-running", "3", "--checkpoint-slots", "2", "--block-tokens", "32"]
    made = as_json(capsys, folder, *sizes, "--role", role)
    load = prefill.load if role == "prefill" else decode.load
    settings = replace(load(["--model", folder, *made["options"]]).engine, role=Role(role), transport="none")
    engine, ready = build_engine(settings, on_event=lambda done: None, transport=None)
    arena, counts = made["arena"], engine.cache.counts()
    assert counts["attention"].total == counts["attention"].free == arena["blocks"]
    assert counts["state"].total == counts["state"].free == arena["slot_floor"] == 3 + 2
    assert (ready.arena_bytes, ready.block_tokens) == (arena["total_bytes"], made["block_tokens"])
    assert engine.cache.max_request_tokens() == made["capacity_tokens"]
    assert ready.max_request_tokens == made["max_request_tokens"]
    engine.close()


def test_a_folder_and_a_cache_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5", 0)
    made = as_json(capsys, str(folder), "--cache-bytes", "8MiB")
    assert (made["model"]["dtype"], made["device_bytes"], made["workspace"]) == ("float32", None, [])
    assert made["arena"]["total_bytes"] == 8 << 20
    assert "weights " not in plan(capsys, str(folder), "--cache-bytes", "8MiB")


def test_a_hub_id_fetches_the_config_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, file: str) -> str:
        asked.append((repo, file))
        return QWEN_4B

    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert as_json(capsys, "owner/name", *ON_24_GIB)["token_bytes"] == 32_768
    assert asked == [("owner/name", "config.json")]


def test_tensors_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, QWEN_4B, *ON_24_GIB, "--tensors")
    assert "   1 × model.embed_tokens.weight (248320, 2560): 635,699,200" in text
    assert "  24 × model.layers.*.linear_attn.A_log (32,) float32: 768" in text
    counted = sum(int(n.replace(",", "")) for n in re.findall(r"^ +\d+ × .*: ([\d,]+)$", text, re.MULTILINE))
    assert f"{counted:,} parameters" in text
    listed = as_json(capsys, QWEN_4B, *ON_24_GIB, "--tensors")["tensors"]
    assert {"name": "model.norm.weight", "shape": [2560], "dtype": None, "count": 1} in listed


# ---- lengths ----


@pytest.fixture(params=["mooncake", "azure"])
def trace(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """100 requests of 10, 20 … 1000 prompt tokens and 1 … 100 output tokens, not in order."""
    rows = [(10 * n, n) for n in range(100, 0, -1)]
    if request.param == "mooncake":
        lines = [json.dumps({"timestamp": 0, "input_length": p, "output_length": o, "hash_ids": [0]}) for p, o in rows]
        path = tmp_path / "trace.jsonl"
    else:
        lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2023-11-16 18:17:03.9799600,{p},{o}" for p, o in rows)]
        path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_lengths_of_a_trace(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    made = as_json(capsys, QWEN_4B, *ON_24_GIB, "--trace", str(trace))
    rows = [(r["name"], r["prompt_tokens"], r["output_tokens"], r["tokens"]) for r in made["requests"]]
    assert rows == [("p50", 500, 50, 550), ("p99", 990, 99, 1089)]
    assert "p99: 990 + 99 tokens" in plan(capsys, QWEN_4B, *ON_24_GIB, "--trace", str(trace))


@pytest.mark.parametrize(("role", "tokens"), [("prefill", 5000), ("decode", 5300), ("both", 5300)])
def test_roles_hold_different_lengths(capsys: pytest.CaptureFixture[str], role: str, tokens: int) -> None:
    lengths = ["--prompt-tokens", "5000", "--output-tokens", "300"]
    made = as_json(capsys, QWEN_4B, *ON_24_GIB, *lengths, "--role", role)
    assert [r["tokens"] for r in made["requests"]] == [tokens]
    assert ("decode graphs" in str(made["workspace"])) == (role != "prefill")
    assert ("under lease" in plan(capsys, QWEN_4B, *ON_24_GIB, "--role", role)) == (role == "prefill")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ('{"input_length": 3}\n', r"line 1: no whole numbers input_length and output_length"),
        ('{"input_length": 3, "output_length": 1}\n{oops', "line 2: no whole numbers"),
        ('{"input_length": -3, "output_length": 1}', "line 1: no whole numbers"),
        ("a,b\n1,2\n", "line 2: no whole numbers ContextTokens and GeneratedTokens"),
    ],
    ids=["empty", "header", "missing", "no json", "negative", "other columns"],
)
def test_broken_traces(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(BadRequest, match=says):
        read_trace(path)


def test_quantiles() -> None:
    assert [quantile([3, 1, 2, 4], share) for share in (0.25, 0.5, 0.99, 1.0)] == [1, 2, 4, 4]
    assert quantile([7], 0.5) == 7


# ---- refusals ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no/such/config.json", "--cache-bytes", "1GiB"], "config.json does not exist"),
        (["DIR", "--cache-bytes", "1GiB"], "DIR/config.json does not exist"),
        ([QWEN_4B, "--device-bytes", "8GiB"], "it takes a device of"),
        ([QWEN_4B, "--cache-bytes", "1MiB"], "too small"),
        ([QWEN_4B, "--cache-bytes", "1GiB", "--max-running", "0"], "max_running must be at least 1, got 0"),
        ([QWEN_4B, "--cache-bytes", "1GiB", "--output-tokens", "5"], "--output-tokens needs --prompt-tokens"),
        ([QWEN_4B, "--cache-bytes", "1GiB", "--prompt-tokens", "0"], "0 prompt and 0 output tokens are no request"),
        ([QWEN_4B, "--cache-bytes", "1GiB", "--trace", "DIR/none"], "cannot read the trace"),
        (
            [QWEN_4B, "--cache-bytes", "1GiB", "--trace", "x", "--prompt-tokens", "1"],
            "either --trace or --prompt-tokens",
        ),
        ([QWEN_4B, "--cache-bytes", "1GiB", "--dtype", "int8"], "'int8' is not supported"),
    ],
    ids=lambda v: " ".join(v[1:]) if isinstance(v, list) else "",
)
def test_refusals(argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", *(a.replace("DIR", str(tmp_path)) for a in argv)]) == 2
    assert message.replace("DIR", str(tmp_path)) in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--device-bytes", "1GiB", "--cache-bytes", "1GiB"]], ids=["neither", "both"])
def test_device_or_cache(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", QWEN_4B, *argv])
    assert re.search("--device-bytes.*--cache-bytes|not allowed with", capsys.readouterr().err)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from services.cli.main import main\n"
        "try: main(['plan', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'nixl', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


# ---- the guide ----


def examples() -> list[tuple[str, str]]:
    """(command line, output) of the fenced blocks of docs/plan.md that begin with one."""
    blocks = re.findall(r"^```\n\$ twinflow plan (.*?)\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    return [(command, output) for command, output in blocks]


@pytest.mark.parametrize(("command", "output"), examples(), ids=lambda v: v if v.startswith("examples/") else "")
def test_the_guide_shows_what_is_printed(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert plan(capsys, *command.split()) == output


def test_the_table_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    """| file | device | running | weights | workspace | arena | tokens | … |"""
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in DOCS.read_text().splitlines() if "GiB |" in line]
    assert {row[0] for row in rows} == {f"`{path.stem}`" for path in CONFIGS.glob("*.json")}
    for name, device, running, weights, workspace, arena, tokens, *_ in rows:
        argv = [str(CONFIGS / f"{name.strip('`')}.json"), "--device-bytes", device.replace(" ", "")]
        made = as_json(capsys, *argv, "--max-running", running, "--checkpoint-slots", "0")
        shown = made["weights_bytes"], made["workspace_bytes"], made["arena"]["total_bytes"], made["capacity_tokens"]
        assert [weights, workspace, arena, tokens] == [f"{n:,}" for n in shown]
