"""The admin API of one worker: both roles over fake engines, each rpc twice; reflection and health beside it."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.node.test_registry import serve as serve_registry
from tests.services.cluster import DecodeClient, open_message, submit, until
from tests.services.conftest import Pair
from twinflow.contracts.errors import from_reason
from twinflow.engine import questions
from twinflow.engine.admin import is_meant
from twinflow.node.registry.direct import DirectRegistration, DirectRegistry
from twinflow.rpc.channel import open_channel, stop_server
from twinflow.rpc.failure import error_of
from twinflow.rpc.v1 import admin_pb2 as pb
from twinflow.rpc.v1 import admin_pb2_grpc as pb_grpc

RPCS = pb.DESCRIPTOR.services_by_name["Admin"].methods_by_name
NEEDS = {"MatchPrompt": {"token_ids": [1, 2, 3, 4, 5]}, "CancelRequest": {"request_id": "nobody"}}


async def call(address: str, method: str, **fields: Any) -> Any:
    """Raises what it ends with, rebuilt from code and metadata."""
    request = getattr(pb, f"{method}Request")(**fields)
    async with open_channel(address, 5.0) as channel:
        try:
            return await getattr(pb_grpc.AdminStub(channel), method)(request, timeout=5)
        except grpc.aio.AioRpcError as e:
            code, error = e.code(), error_of(e, address)
    assert error.grpc_code == code.name
    raise error


@pytest.mark.parametrize("side", ["d", "p"])
@pytest.mark.parametrize("method", RPCS)
async def test_every_rpc_twice_gives_the_same(pair: Pair, method: str, side: str) -> None:
    front = getattr(pair, side)
    answers = [await call(front.address, method, **NEEDS.get(method, {})) for _ in range(3)]
    assert len(answers[0].workers) == 1
    assert answers[1] == answers[2]  # the first may be the one that changed something
    named = await call(front.address, method, worker_id=front.worker_id, **NEEDS.get(method, {}))
    assert named == answers[1]


@pytest.mark.parametrize("method", RPCS)
async def test_another_workers_id_is_not_found(pair: Pair, method: str) -> None:
    with pytest.raises(type(from_reason("unknown_worker", "")), match="unknown worker 'x': this is d0"):
        await call(pair.d.address, method, worker_id="x", **NEEDS.get(method, {}))


async def test_capacity_adds_up(pair: Pair) -> None:
    (capacity,) = (await call(pair.d.address, "GetCapacity")).workers
    attention, state = capacity.groups
    assert (attention.group, attention.kind, attention.block_tokens, attention.unit_bytes) == (
        "attention", "attention", 4, 64
    )  # fmt: skip
    assert (state.group, state.kind, state.block_tokens, state.unit_bytes) == ("state", "state", 0, 16)
    for g in capacity.groups:
        assert g.free_units + g.cached_units + g.held_units + g.doomed_units == g.total_units
    assert (attention.pinned_units, attention.stored_units, state.stored_units) == (2, 5, 2)
    assert (capacity.capacity_tokens, capacity.max_request_tokens, capacity.arena_bytes) == (64 * 4, 512, 1 << 20)


@pytest.mark.parametrize(
    ("fields", "reason", "message"),
    [
        ({}, "bad_request", "the prompt is empty"),
        ({"text": "hello"}, "unsupported", "no tokenizer"),
        ({"token_ids": [1, 1000]}, "bad_request", "token id 1000, the vocabulary ends at 999"),
    ],
    ids=["nothing", "text", "vocabulary"],
)
async def test_prompts_that_cannot_be_matched(pair: Pair, fields: dict, reason: str, message: str) -> None:
    with pytest.raises(type(from_reason(reason, "")), match=message):
        await call(pair.d.address, "MatchPrompt", **fields)


async def test_flush_names_a_group_that_is_not_there(pair: Pair) -> None:
    with pytest.raises(type(from_reason("bad_request", "")), match="unknown cache group 'kv'"):
        await call(pair.d.address, "FlushCache", group="kv")
    (first,) = (await call(pair.d.address, "FlushCache", group="state")).workers
    assert [(g.group, g.units, g.bytes) for g in first.groups] == [("state", 2, 32)]


async def test_requests_and_leases_are_listed_at_both_ends(pair: Pair) -> None:
    pair.p_engine.hold("prefilled")
    pair.router.submit(submit("cmpl-1-0-1", pair.prefill))
    await until(lambda: pair.router.tokens("cmpl-1-0-1"))
    (d,) = (await call(pair.d.address, "ListRequests")).workers
    (p,) = (await call(pair.p.address, "ListRequests")).workers
    assert [(r.id, r.owner, r.prefill_worker) for r in d.requests] == [("cmpl-1-0-1", "r0", "p0")]
    assert [(r.id, r.owner) for r in p.requests] == [("cmpl-1-0-1", "d0")]
    (lease,) = p.leases
    assert (lease.request_id, lease.reader, lease.reader_incarnation) == ("cmpl-1-0-1", "d0", pair.d.incarnation)
    assert (lease.blocks, lease.slots, lease.prefilled, len(d.leases)) == (1, 0, False, 0)
    assert lease.age_s > 0 and lease.lease_id.startswith(pair.p.incarnation)
    (status,) = (await call(pair.d.address, "ListWorkers")).workers
    assert (status.connected, status.active_requests) == (True, 1)
    pair.p_engine.go("prefilled")
    await pair.router.end_of("cmpl-1-0-1")
    await until(lambda: pair.quiet)
    assert not (await call(pair.p.address, "ListRequests")).workers[0].leases


@pytest.mark.parametrize("side", ["d", "p"])
@pytest.mark.parametrize("wanted", ["cmpl-1", "cmpl-1-0", "cmpl-1-0-1"])
async def test_cancel_by_any_form_of_the_id(pair: Pair, side: str, wanted: str) -> None:
    pair.p_engine.hold("prefilled")
    for id in ("cmpl-1-0-1", "cmpl-12-0-1"):
        pair.router.submit(submit(id, pair.prefill))
        await until(lambda id=id: pair.router.tokens(id))
    front = getattr(pair, side)
    answers = [(await call(front.address, "CancelRequest", request_id=wanted)).workers[0] for _ in range(2)]
    assert [list(a.cancelled) for a in answers] == [["cmpl-1-0-1"], []]
    last = await pair.router.end_of("cmpl-1-0-1")
    assert last.error.reason == "cancelled" and "an operator" in last.error.message
    pair.p_engine.go("prefilled")
    assert not (await pair.router.end_of("cmpl-12-0-1")).HasField("error")
    await until(lambda: pair.quiet)


def test_which_ids_are_meant() -> None:
    assert is_meant("cmpl-ab-0-1", "cmpl-ab") and is_meant("a", "a")
    assert not is_meant("cmpl-ab-0-1", "cmpl-a") and not is_meant("cmpl-ab-0-1", "cmpl")
    with pytest.raises(AssertionError):
        assert is_meant("a", "a-1")


async def test_cancel_needs_an_id(pair: Pair) -> None:
    with pytest.raises(type(from_reason("bad_request", "")), match="no request_id"):
        await call(pair.d.address, "CancelRequest")


async def test_a_draining_decode_worker_finishes_and_refuses(pair: Pair) -> None:
    pair.d_engine.hold("tokens")
    pair.router.submit(submit("a"))
    await until(lambda: pair.d_engine.running)
    first = (await call(pair.d.address, "Drain")).workers[0]
    assert (first.draining, first.changed, first.requests) == (True, True, 1)
    assert pair.d.record().draining
    pair.router.submit(submit("b"))
    refused = await pair.router.end_of("b")
    assert (refused.error.reason, "d0 is draining" in refused.error.message) == ("draining", True)
    again = (await call(pair.d.address, "Drain")).workers[0]
    assert (again.draining, again.changed, again.requests) == (True, False, 1)
    pair.d_engine.go("tokens")
    assert not (await pair.router.end_of("a")).HasField("error")
    assert (await call(pair.d.address, "Drain")).workers[0].requests == 0
    undrained = [(await call(pair.d.address, "Undrain")).workers[0] for _ in range(2)]
    assert [(u.draining, u.changed) for u in undrained] == [(False, True), (False, False)]
    pair.router.submit(submit("c"))
    assert not (await pair.router.end_of("c")).HasField("error")


async def test_a_draining_prefill_worker_serves_open_hand_offs_only(pair: Pair) -> None:
    pair.p_engine.hold("prefilled")
    pair.router.submit(submit("a", pair.prefill))
    await until(lambda: pair.router.tokens("a"))
    drained = (await call(pair.p.address, "Drain")).workers[0]
    assert (drained.requests, drained.leases) == (0, 1)
    pair.router.submit(submit("b", pair.prefill))  # it goes nowhere else: the decode worker computes the prompt itself
    local = await pair.router.end_of("b")
    assert (local.stats.route, "p0 is draining" in local.stats.reason) == ("local", True)
    pair.p_engine.go("prefilled")
    assert (await pair.router.end_of("a")).stats.route == "remote"
    assert (await call(pair.p.address, "Drain")).workers[0].leases == 0


async def test_a_raw_open_at_a_draining_worker_is_refused_by_reason(pair: Pair, opened) -> None:
    await call(pair.p.address, "Drain")
    client = DecodeClient(pair.p.address)
    opened.push_async_callback(client.close)
    client.open(open_message("x"))
    assert (await client.wait("failed")).error.reason == "draining"


async def test_the_registry_hears_of_a_drain_at_once(pair: Pair) -> None:
    registry = DirectRegistry()
    server, port = await serve_registry(registry)
    registration = DirectRegistration(f"127.0.0.1:{port}", pair.d.record, interval_s=30.0)
    pair.d.announce = registration.announce
    task = asyncio.create_task(registration.run())
    await until(lambda: "d0" in registry.records())
    await call(pair.d.address, "Drain")
    await until(lambda: registry.records()["d0"].draining, within_s=1.0)
    await call(pair.d.address, "Undrain")
    await until(lambda: not registry.records()["d0"].draining, within_s=1.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await stop_server(server, 0)


async def test_an_engine_that_does_not_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.d_engine.deaf = True
    monkeypatch.setattr(questions.Questions.ask, "__defaults__", (0.1,))
    with pytest.raises(type(from_reason("deadline", "")), match=r"engine did not answer within 0\.1 s"):
        await call(pair.d.address, "GetCapacity")


@pytest.mark.parametrize("side", ["d", "p"])
async def test_reflection_and_health(pair: Pair, side: str) -> None:
    async with open_channel(getattr(pair, side).address, 5.0) as channel:
        await check_reflection_and_health(channel, {"twinflow.rpc.v1.Admin", "twinflow.rpc.v1.Worker"})


async def check_reflection_and_health(channel: grpc.aio.Channel, services: set[str]) -> None:
    """What grpcurl does: list, then describe; and a health probe per service."""
    ask = reflection_pb2.ServerReflectionRequest
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([ask(list_services=""), ask(file_containing_symbol="twinflow.rpc.v1.Admin")]))
    listed, described = [answer async for answer in call]
    names = {s.name for s in listed.list_services_response.service}
    assert names == services | {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert any(b"FlushCache" in f for f in described.file_descriptor_response.file_descriptor_proto)
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", *services):
        checked = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
