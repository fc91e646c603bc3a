"""Real processes, the shipped model, real NIXL: a worker is lost and comes back, and the same greedy text comes out each time.

TWINFLOW_TEST_MODEL names another model folder to run this with.
"""

import http.client
import json
import os
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.cluster import Cluster, get_json
from services.cli.memory import pss_bytes, tree
from services.cli.topology import ClusterSettings, plan, with_model_here

MODEL = os.environ.get("TWINFLOW_TEST_MODEL", "models/twinflow-tiny")
READY_S = 100.0
PROMPT = "Once upon a time there lived at the edge of a great forest an old clockmaker and his granddaughter. " * 14


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters that are stopped, without a kill, after the test."""
    clusters: list[Cluster] = []

    def run(**settings: Any) -> Cluster:
        made = plan(with_model_here(ClusterSettings(MODEL, port=0, dtype="float32", verify="checksum", **settings)))
        logs = tmp_path / f"cluster-{len(clusters)}"
        logs.mkdir()
        cluster = Cluster(made, log_dir=logs)
        clusters.append(cluster)
        cluster.start_all()
        cluster.wait_ready(READY_S)
        return cluster

    yield run
    for cluster in clusters:
        pids = [pid for p in cluster.running for pid in tree(p.pid)]
        assert cluster.stop() == [], "a process ignored SIGTERM"
        wait_until(lambda left=pids: not any(map(pss_bytes, left)))  # nothing outlives its cluster


def complete(cluster: Cluster, prompt: str = PROMPT) -> tuple[str, dict[str, Any]]:
    """(greedy text, statistics). Raises AssertionError on anything but a 200."""
    url = urllib.parse.urlsplit(cluster.base_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
    body = {"model": Path(MODEL).name, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "x-twinflow-stats": "1"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert response.status == 200, answer
    return answer["choices"][0]["text"], answer["twinflow"]


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def connected(cluster: Cluster) -> set[str]:
    return {w["id"] for w in get_json(cluster.base_url, "/health")[1]["workers"] if w["connected"]}


def test_workers_come_and_go(start: Callable[..., Cluster]) -> None:
    cluster = start()
    text, stats = complete(cluster)
    assert text
    assert (stats["route"], stats["slots_moved"], stats["decode_attention_tokens"]) == ("remote", 1, 0)
    assert stats["bytes_moved"] > 0

    again, stats = complete(cluster)  # everything is cached somewhere
    assert again == text
    assert stats["cached_tokens"] > 0

    cluster.kill("prefill-0")
    wait_until(lambda: connected(cluster) == {"decode-0"})
    alone, stats = complete(cluster)
    assert (alone, stats["route"]) == (text, "local")

    cluster.start("prefill-0")
    cluster.kill("decode-0")
    wait_until(lambda: get_json(cluster.base_url, "/ready")[0] == 503)
    cluster.start("decode-0")
    cluster.wait_ready(READY_S)
    afresh, stats = complete(cluster)
    assert (afresh, stats["route"], stats["decode_attention_tokens"]) == (text, "remote", 0)
    cluster.check()


def test_aggregated_workers_need_no_prefill_worker(start: Callable[..., Cluster]) -> None:
    cluster = start(prefill=0, decode=2)
    _, stats = complete(cluster)
    assert (stats["route"], stats["bytes_moved"]) == ("local", 0)
    cluster.kill(stats["decode_worker"])
    wait_until(lambda: len(connected(cluster)) == 1)
    text, stats = complete(cluster)
    assert text
    assert stats["route"] == "local"
