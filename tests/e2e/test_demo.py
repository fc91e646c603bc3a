"""`make demo` for real: exits 0, answers through the openai client, and its table shows what moved."""

import re
import subprocess
import sys

import pytest

from tests.e2e.conftest import MODEL


@pytest.mark.timeout(240)
def test_the_demo_runs_and_shows_what_moved() -> None:
    command = [sys.executable, "-m", "services.cli", "demo", "--model", MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stderr[-3000:]
    table = done.stdout[done.stdout.index("prompt") :]
    assert re.search(r"remote", table) and re.search(r"ucx/", table)
    seconds = float(re.search(r"the demo took ([\d.]+) s", done.stdout).group(1))  # type: ignore[union-attr]
    assert seconds < 180
