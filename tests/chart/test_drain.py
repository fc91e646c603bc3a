"""What a worker's preStop runs: it ends when nothing is left, at its limit, and at once where nobody answers."""

import runpy
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from tools.chart.check import CHART
from twinflow.rpc.v1 import admin_pb2, admin_pb2_grpc

Left = tuple[int, int]  # requests, leases


@pytest.fixture(scope="module")
def drain() -> Callable[[str, float], str]:
    found: Callable[[str, float], str] = runpy.run_path(str(CHART / "files/drain.py"))["drain"]
    return found


class Worker(admin_pb2_grpc.AdminServicer):
    """Answers Drain with what is left, the last answer for ever."""

    def __init__(self, *left: Left) -> None:
        self.left = list(left)
        self.calls = 0

    def Drain(self, request: Any, context: Any) -> Any:
        assert not request.worker_id
        requests, leases = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        self.calls += 1
        drained = admin_pb2.WorkerDrain(worker_id="w", draining=True, requests=requests, leases=leases)
        return admin_pb2.DrainResponse(workers=[drained])


@contextmanager
def serving(worker: Worker) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_it_waits_for_requests_and_leases(drain: Callable[[str, float], str]) -> None:
    worker = Worker((2, 1), (0, 1), (0, 0))
    with serving(worker) as address:
        assert drain(address, 30.0) == "nothing is left"
    assert worker.calls == 3


def test_it_ends_at_its_limit(drain: Callable[[str, float], str]) -> None:
    with serving(Worker((3, 0))) as address:
        assert drain(address, 0.6) == "3 requests and leases are left after 0.6 s"


def test_nobody_answers(drain: Callable[[str, float], str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    began = time.monotonic()
    assert drain(f"127.0.0.1:{port}", 30.0).startswith("no answer (UNAVAILABLE)")
    assert time.monotonic() - began < 10
