"""Two HTTP processes and the one that owns view, choice and gate, on one port."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys

import httpx
import psutil
import pytest

from tests.router.conftest import Cluster, running, until
from tests.router.fake_worker import FakeWorker, echo


@contextlib.asynccontextmanager
async def served(model_folder, **config: object):
    async with running(model_folder, processes=2, **config) as cluster:
        worker = FakeWorker("toy", max_request_tokens=4096)
        await cluster.add(worker)
        await until(lambda: worker.sessions >= 3, within_s=30)  # the owner's and one of each HTTP process
        yield cluster, worker


@contextlib.asynccontextmanager
async def clients_of(cluster: Cluster, count: int):
    """Each with a connection of its own."""
    async with contextlib.AsyncExitStack() as stack:
        made = [httpx.AsyncClient(base_url=cluster.url, timeout=60, verify=False) for _ in range(count)]
        yield [await stack.enter_async_context(client) for client in made]


def http_pids(cluster: Cluster) -> list[int]:
    return cluster.router.children.pids


def connections(pid: int, cluster: Cluster) -> int:
    """Clients of this process."""
    port = int(cluster.router.http_address.rsplit(":", 1)[1])
    found = psutil.Process(pid).net_connections("tcp")
    return sum(c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in found)


async def ask(client: httpx.AsyncClient, tokens: int = 4) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": "toy", "prompt": "hello there", "max_tokens": tokens})


KEYS = f"""
[anonymous]

[keys.team]
sha256 = "{hashlib.sha256(b"sk-team").hexdigest()}"
requests_per_min = 3
"""


async def test_one_router_in_all_that_is_seen_of_it(model_folder, tmp_path):
    """Started once for three looks at it: starting takes seconds."""
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    async with served(model_folder, admin_token="secret", api_keys=str(keys)) as (cluster, worker):
        await every_choice_is_charged_in_one_place(cluster, worker)
        await a_client_that_leaves_is_forgotten_by_the_owner_too(cluster, worker)
        await limits_of_a_key_hold_over_all_processes(cluster)
        await all_processes_leave_a_worker_whose_engine_is_silent(cluster, worker)


async def every_choice_is_charged_in_one_place(cluster: Cluster, worker: FakeWorker) -> None:
    async with clients_of(cluster, 16) as clients:
        worker.gate = asyncio.Event()
        asked = [asyncio.create_task(ask(client)) for client in clients]
        await until(lambda: len(worker.submits) == 16, within_s=30)
        view = cluster.router.view
        (facts,) = view.snapshot().workers
        assert facts.active_requests == 16
        assert all(connections(pid, cluster) for pid in http_pids(cluster)), "the port is not shared"
        worker.gate.set()
        answers = await asyncio.gather(*asked)
        assert {a.status_code for a in answers} == {200}
        assert len({a.json()["choices"][0]["text"] for a in answers}) == 1
        await until(lambda: view.snapshot().workers[0].active_requests == 0)
        await until(lambda: cluster.router.gate.held == 0)

        pages = [(await client.get("/metrics")).text for client in clients]
        assert all('twinflow_router_requests_total{outcome="ok"} 16.0' in page for page in pages)
        assert all('twinflow_router_workers{role="decode"} 1.0' in page for page in pages)
        shown = await clients[0].get(
            "/v1/internal/explain", params={"limit": 100}, headers={"authorization": "Bearer secret"}
        )
        assert len(shown.json()["decisions"]) == 16
        assert (await clients[0].get("/ready")).status_code == 200


async def all_processes_leave_a_worker_whose_engine_is_silent(cluster: Cluster, worker: FakeWorker) -> None:
    """Each hears of it in its own session, and the owner, who chooses, in another one."""
    worker.submits.clear()
    worker.cancels.clear()
    worker.script, worker.finish_last = lambda submit: echo(submit)[:2], False
    async with clients_of(cluster, 16) as clients:
        asked = [asyncio.create_task(ask(client)) for client in clients]
        await until(lambda: len(worker.submits) == 16, within_s=30)
        assert all(connections(pid, cluster) for pid in http_pids(cluster))
        other = await cluster.add(FakeWorker("toy", "d1", max_request_tokens=4096))
        await until(lambda: other.sessions >= 3, within_s=30)
        worker.engine_silent_s = 2.5
        answers = await asyncio.gather(*asked)
        ids = cluster.encode("hello there")
        said = cluster.text.decode([ids[i % len(ids)] for i in range(4)])
        assert {(a.status_code, a.json()["choices"][0]["text"]) for a in answers} == {(200, said)}
        assert len(other.submits) == len(worker.cancels) == 16


async def test_a_killed_http_process_takes_only_its_own_streams_along(model_folder):
    async with served(model_folder, shutdown_s=20.0) as (cluster, worker), clients_of(cluster, 16) as clients:
        worker.delay_s = 0.02
        texts: list[str] = [""] * 16
        ends: list[str] = [""] * 16

        async def stream(i: int) -> None:
            body = {"model": "toy", "prompt": f"number {i} hello", "max_tokens": 150, "stream": True}
            try:
                async with clients[i].stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line == "data: [DONE]":
                            ends[i] = "done"
                        elif line.startswith("data: "):
                            texts[i] += json.loads(line[6:])["choices"][0]["text"]
            except httpx.HTTPError:
                ends[i] = "lost"

        tasks = [asyncio.create_task(stream(i)) for i in range(16)]
        await until(lambda: all(texts), within_s=30)
        victim = http_pids(cluster)[0]
        its_own = connections(victim, cluster)
        os.kill(victim, signal.SIGKILL)
        await asyncio.gather(*tasks)
        assert 0 < its_own < 16, "all connections went to one process"
        assert (ends.count("lost"), ends.count("done")) == (its_own, 16 - its_own)
        prompts = [cluster.encode(f"number {i} hello") for i in range(16)]
        whole = [cluster.text.decode([ids[k % len(ids)] for k in range(150)]) for ids in prompts]
        assert all(text == said for text, said, end in zip(texts, whole, ends, strict=True) if end == "done")

        view = cluster.router.view
        await until(lambda: view.snapshot().workers[0].active_requests == 0, within_s=20)
        assert cluster.router.gate.held == 0, "the dead process's permits are still held"
        await until(lambda: len(http_pids(cluster)) == 2 and victim not in http_pids(cluster), within_s=30)
        await until(lambda: worker.sessions >= 4, within_s=30)
        async with clients_of(cluster, 12) as others:
            assert {(await ask(client)).status_code for client in others} == {200}
            assert all(connections(pid, cluster) for pid in http_pids(cluster))
        await a_stop_lets_running_replies_end(cluster, worker)


async def a_stop_lets_running_replies_end(cluster: Cluster, worker: FakeWorker) -> None:
    worker.delay_s = 0.01
    worker.submits.clear()
    async with clients_of(cluster, 6) as clients:
        asked = [asyncio.create_task(ask(client, 100)) for client in clients]
        await until(lambda: len(worker.submits) == 6, within_s=30)
        pids = http_pids(cluster)
        await cluster.router.children.stop()
        assert {a.status_code for a in await asyncio.gather(*asked)} == {200}
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(httpx.ConnectError):
        await cluster.http.get("/live")


async def a_client_that_leaves_is_forgotten_by_the_owner_too(cluster: Cluster, worker: FakeWorker) -> None:
    worker.gate = asyncio.Event()
    worker.submits.clear()
    async with clients_of(cluster, 1) as (client,):
        asked = asyncio.create_task(ask(client))
        await until(lambda: bool(worker.submits), within_s=30)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await until(lambda: bool(worker.cancels))
    await until(lambda: cluster.router.view.snapshot().workers[0].active_requests == 0)
    await until(lambda: cluster.router.gate.held == 0)
    worker.gate = None


async def limits_of_a_key_hold_over_all_processes(cluster: Cluster) -> None:
    answers = []
    async with clients_of(cluster, 8) as clients:
        for client in clients:
            client.headers["authorization"] = "Bearer sk-team"
            answers.append(await ask(client))
    assert [a.status_code for a in answers] == [200] * 3 + [429] * 5
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert int(answers[-1].headers["retry-after"]) > 0


async def test_a_process_that_cannot_start_is_said(model_folder, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(OSError, match="did not start"):
        async with running(model_folder, processes=2):
            pass


def test_nobody_serves_without_the_owner(model_folder):
    command = [sys.executable, "-m", "services.router.main", "--model", str(model_folder), "--processes", "2"]
    command += ["--http-port", "0", "--grpc-port", "0", "--shutdown-s", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stderr is not None
        ready = owner.stdout.readline()
        http = psutil.Process(owner.pid).children()
        url = ready.split(", ")[1].removesuffix("/v1")
        assert len(http) == 2 and httpx.get(f"{url}/live").status_code == 200
        owner.kill()
        assert psutil.wait_procs(http, timeout=30)[1] == [], "an HTTP process outlives its owner"
        assert owner.stderr.read().count("the router's main process is gone") == 2
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/live")
