"""The command line itself: complete help, clear errors, nothing heavy imported."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.main import build_parser, main
from services.cli.serve import SERVICES


def subparsers() -> dict[str, argparse.ArgumentParser]:
    action = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: p for name, p in action.choices.items() if name not in SERVICES}


@pytest.mark.parametrize("name", sorted(subparsers()))
def test_every_option_has_a_help_text(name: str) -> None:
    parser = subparsers()[name]
    assert parser.description
    assert [a.dest for a in parser._actions if not a.help] == []


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"    {name} " in out for name in [*subparsers(), *SERVICES])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["up"], "required: --model"),
        (["up", "--model", "x", "--prefil", "2"], "unrecognized arguments: --prefil 2"),
        (["up", "--model", "x", "--decode", "many"], "argument --decode: invalid int value: 'many'"),
        (["up", "--model", "x", "--cache-bytes", "lots"], "'lots' is no size; write bytes, 512MiB or 8GiB"),
        (["up", "--model", "x", "--cache-bytes", "0"], "must be positive"),
        (["up", "--model", "x", "--set", "decode=3"], "is not PROCESS:OPTION=VALUE"),
        (["up", "--model", "x", "--set", "cook:a=3"], "is not PROCESS:OPTION=VALUE"),
    ],
    ids=lambda v: " ".join(v) or "nothing" if isinstance(v, list) else "",
)
def test_bad_options_are_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "no/such/folder"], "no/such/folder does not exist"),
        (["--model", "EMPTY"], "has no config.json, so it holds no model"),
        (["--model", "org/name", "--decode", "0"], "--decode must be 1 or more, got 0"),
        (["--model", "org/name", "--prefill", "-1"], "--prefill must be 0 or more, got -1"),
        (["--model", "org/name", "--port", "65536"], "--port must be 0 to 65535, got 65536"),
        (["--model", "org/name", "--port", "TAKEN"], "is in use on 127.0.0.1"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_impossible_clusters_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, taken_port: int
) -> None:
    named = [{"EMPTY": str(tmp_path), "TAKEN": str(taken_port)}.get(a, a) for a in argv]
    assert main(["up", *named]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["up", "--help"], ["router", "--help"]], ids=" ".join)
def test_help_needs_no_torch(argv: list[str]) -> None:
    code = (
        "import sys; from services.cli.main import main\n"
        f"try: main({argv!r})\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'nixl', 'openai', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
