"""Servers for other people's client packages, started once, in processes of their own: the packages live in an environment
without ours, whose python TWINFLOW_PYTHON names (`make test-clients`)."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.cli.cluster import Cluster, ClusterPlan, free_ports
from services.cli.process import ProcessSpec

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("TWINFLOW_PYTHON", sys.executable)
READY_S = 150.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.filterwarnings("default"))  # theirs are not ours to mend


@dataclass(frozen=True)
class Server:
    """`url` ends with /v1."""

    url: str
    model: str


def start(name: str, port: int, model: str, workers: tuple[str, ...], argv: list[str], logs: Path) -> Iterator[Server]:
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    plan = ClusterPlan((ProcessSpec(name, (PYTHON, *argv), env),), f"http://127.0.0.1:{port}", workers)
    with Cluster(plan, log_dir=logs, stages=(name,)) as cluster:
        cluster.start_all()
        cluster.wait_ready(READY_S)
        yield Server(f"{plan.base_url}/v1", model)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shipped model on a prefill and a decode worker; everything goes through a hand-off."""
    (port,) = free_ports(1)
    model = ROOT / "models" / "twinflow-tiny"
    argv = ["-m", "services.cli", "up", f"--model={model}", f"--port={port}", "--dtype=float32", "--verify=checksum"]
    argv += ["--set=decode:local-max-tokens=0", "--set=router:local-max-tokens=0"]
    workers = ("prefill-0", "decode-0")
    yield from start("up", port, model.name, workers, argv, tmp_path_factory.mktemp("up"))


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that repeats the last user's message (`tests.clients.parrot`)."""
    (port,) = free_ports(1)
    folder = tmp_path_factory.mktemp("parrot")
    argv = ["-m", "tests.clients.parrot", str(port), str(folder / "model")]
    yield from start("parrot", port, "parrot", ("d0",), argv, folder)
