"""Real processes, the shipped model, real NIXL: two prefill and two decode workers, and an aggregated one beside them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.cli.cluster import Cluster
from services.cli.topology import ClusterSettings, plan, with_model_here
from tests.e2e.oracle import Oracle

MODEL = os.environ.get("TWINFLOW_TEST_MODEL", "models/twinflow-tiny")
READY_S = 150.0


@dataclass(frozen=True)
class Workers:
    """host:port by process name (prefill-0, prefill-1, decode-0, decode-1)."""

    cluster: Cluster
    addresses: dict[str, str]


def start(tmp: Path, **settings: object) -> Workers:
    """A cluster that is ready; verify=checksum, so that a wrong byte is an error and never a token."""
    values = {"model": MODEL, "port": 0, "dtype": "float32", "verify": "checksum", "cache_bytes": 192 << 20, **settings}
    made = plan(with_model_here(ClusterSettings(**values)))  # type: ignore[arg-type]
    cluster = Cluster(made, log_dir=tmp)
    addresses = {}
    for spec in made.specs:
        ports = [a.split("=")[1] for a in spec.argv if a.startswith("--port=")]
        if ports:
            addresses[spec.name] = f"127.0.0.1:{ports[0]}"
    cluster.start_all()
    cluster.wait_ready(READY_S)
    return Workers(cluster, addresses)


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """`local-max-tokens` 0: whatever has a candidate goes through a hand-off, however short the rest is."""
    extra = [("decode", "local-max-tokens=0"), ("router", "local-max-tokens=0")]
    extra += [(kind, "engine.checkpoint-slots=420") for kind in ("prefill", "decode")]  # what is warm stays warm
    started = start(tmp_path_factory.mktemp("cluster"), prefill=2, decode=2, cache_bytes=400 << 20, extra=tuple(extra))
    yield started
    assert started.cluster.stop() == []


@pytest.fixture(scope="session")
def aggregated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    started = start(tmp_path_factory.mktemp("aggregated"), prefill=0, decode=1)
    yield started
    assert started.cluster.stop() == []


@pytest.fixture(scope="session")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """For tests that kill workers, and start again what they killed. Small chunks, so that a prompt takes a while."""
    extra = [("decode", "local-max-tokens=0"), ("router", "local-max-tokens=0"), ("prefill", "engine.chunk-tokens=8")]
    started = start(tmp_path_factory.mktemp("mortal"), prefill=2, decode=2, extra=tuple(extra))
    yield started
    assert started.cluster.stop() == []


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle(MODEL)
