"""What only happens when things go wrong, as the workers' metrics count it. The rest: tests/flow/test_metrics.py."""

import contextlib
import dataclasses

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.services.cluster import TIMES, DecodeClient, RouterClient, decode_front, open_message, prefill_front, submit
from tests.services.cluster import until as eventually
from tests.services.conftest import Pair
from tests.services.fake_engine import FakeEngine
from twinflow.engine.front import Front, ready_line
from twinflow.engine.metrics import PeerLabels


async def value(front: Front, name: str, **labels: str) -> float:
    async with httpx.AsyncClient(timeout=5) as http:
        text = (await http.get(front.scrapes.url)).text
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


async def test_leases_by_how_they_end(opened: contextlib.AsyncExitStack) -> None:
    engine = FakeEngine()
    times = dataclasses.replace(TIMES, lease_s=0.4)
    front, role = await opened.enter_async_context(prefill_front(engine, times=times, max_open=4))
    client = DecodeClient(front.address)
    opened.push_async_callback(client.close)
    await client.wait("hello")

    client.open(open_message("expires"))
    await client.wait("failed")
    client.open(open_message("refused"))
    lease = (await client.wait("accepted", 2)).lease_id
    await client.wait("finished", 2)
    client.pulled(id="refused", lease_id=lease, incarnation="older", session_epoch=client.epoch, generation=3)
    await client.wait("failed", 2)
    client.open(open_message("first", idempotency_id="same"))
    await client.wait("accepted", 3)
    client.open(open_message("second", idempotency_id="same"))
    await client.wait("accepted", 4)
    client.open(open_message("bad", have_tokens=3))
    await client.wait("failed", 4)
    await client.close()
    await eventually(lambda: not len(role.offers))

    for end in ("expired", "refused", "superseded", "session_lost"):
        assert await value(front, "twinflow_leases_ended_total", end=end) == 1, end
    assert await value(front, "twinflow_leases_ended_total") == 4
    assert await value(front, "twinflow_lease_refusals_total", reason="incarnation") == 1
    assert await value(front, "twinflow_handoffs_refused_total", reason="bad_request") == 1
    assert await value(front, "twinflow_leases_open") == 0
    assert await value(front, "twinflow_handoff_sessions") == 0


async def test_a_candidate_that_cannot_be_reached_counts_and_the_request_runs_here(pair: Pair) -> None:
    gone = pair.prefill
    gone.worker_id, gone.addresses[:] = "gone", ["127.0.0.1:1"]
    pair.router.submit(submit("r", gone))
    await pair.router.end_of("r")
    pair.router.submit(submit("wrong", max_tokens=100_000))
    await pair.router.end_of("wrong")
    assert await value(pair.d, "twinflow_handoff_failures_total", peer="gone", reason="handoff_failed") == 1
    assert await value(pair.d, "twinflow_handoffs_total", peer="gone", outcome="failed") == 1
    assert await value(pair.d, "twinflow_requests_total", route="local", outcome="ok") == 1
    assert await value(pair.d, "twinflow_requests_total", route="none", outcome="too_long") == 1


async def test_requests_of_an_engine_that_died_are_counted(opened: contextlib.AsyncExitStack) -> None:
    engine = FakeEngine()
    engine.hold("tokens")
    front, _ = await opened.enter_async_context(decode_front(engine))
    router = RouterClient(front.address)
    opened.push_async_callback(router.close)
    router.submit(submit("r"))
    await eventually(lambda: engine.running)
    engine.die()
    await router.end_of("r")
    assert await value(front, "twinflow_requests_total", outcome="internal") == 1


async def test_off_and_a_port_of_choice(opened: contextlib.AsyncExitStack) -> None:
    on, _ = await opened.enter_async_context(decode_front(FakeEngine()))
    off, _ = await opened.enter_async_context(decode_front(FakeEngine(), metrics_port=-1))
    assert f"metrics {on.scrapes.url}" in ready_line(on) and on.scrapes.url.startswith("http://127.0.0.1:")
    assert "metrics off" in ready_line(off)
    assert await value(on, "twinflow_worker_info", worker="d0", role="decode") == 1
    assert await value(on, "twinflow_worker_draining") == 0
    on.drain(True)
    assert await value(on, "twinflow_worker_draining") == 1


def test_peers_are_bounded() -> None:
    peers = PeerLabels(limit=2)
    assert [peers.label(p) for p in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]
