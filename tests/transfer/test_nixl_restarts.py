"""Real NIXL agents that come and go: the reader keeps neither memory nor descriptors of them. (200 of them: the benchmark.)"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nixl")
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tls", ["", "tcp"], ids=["default", "tcp"])
def test_restarted_peers_leave_nothing_behind(tls: str) -> None:
    """In a process of its own: UCX_TLS is read once."""
    argv = ["-m", "benchmarks.peer_restarts", "--restarts=40", "--warm=20", f"--tls={tls}"]
    environment = {k: v for k, v in os.environ.items() if k != "UCX_TLS"}
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    print(f"\n{result}")
    assert result["transport"] == ("ucx/tcp" if tls else "ucx/cma")
    assert result["grown"]["descriptors"] < 2, "of 20 peers"
    assert result["grown"]["rss_kib"] < 16 << 10, "one arena of the peer is 8 MiB"
