"""The README's examples, cut out of the page and run as written; only the port is a free one and .venv the running one."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.cluster import Cluster, ClusterPlan, ProcessSpec, free_ports
from tests.e2e.conftest import READY_S

ROOT = Path(__file__).parents[2]
SECTION = re.search(r"## A cluster of your own\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.S)
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", SECTION.group(1) if SECTION else "", re.S)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """`twinflow up` as the README says it."""
    (port,) = free_ports(1)
    command = BLOCKS[0][1].replace(".venv/bin/twinflow", f"{sys.executable} -m services.cli").replace("8000", str(port))
    up = ProcessSpec("up", tuple(command.split()), {"OMP_NUM_THREADS": "1"})
    plan = ClusterPlan((up,), f"http://127.0.0.1:{port}", ("prefill-0", "decode-0"))
    with Cluster(plan, log_dir=tmp_path_factory.mktemp("readme"), stages=("up",)) as cluster:
        cluster.start_all()
        cluster.wait_ready(READY_S)
        yield port


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_section_has_what_is_run_here() -> None:
    assert [kind for kind, _ in BLOCKS] == ["", "", "python"]
    assert BLOCKS[1][1].count("curl ") == 2


def test_curl_examples(port: int) -> None:
    chat, completion = (f"curl -sS {c}" for c in BLOCKS[1][1].replace("8000", str(port)).split("curl ")[1:])
    streamed = run(["bash", "-c", chat])
    assert streamed.count("data: ") > 3 and streamed.rstrip().endswith("data: [DONE]")
    assert '"text"' in (whole := run(["bash", "-c", completion])) and '"usage"' in whole


def test_python_example(port: int) -> None:
    out = run([sys.executable, "-W", "ignore", "-c", BLOCKS[2][1].replace("8000", str(port))])
    assert "'route':" in out and len(out) > 300
