"""Losses on the decode side's view: a prefill worker that dies, restarts, lies, or an engine that is gone."""

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.services.cluster import (
    PROMPT,
    PrefillServer,
    RouterClient,
    candidate,
    decode_front,
    prefill_front,
    submit,
    until,
)
from tests.services.conftest import Pair
from tests.services.fake_engine import FakeEngine, token
from twinflow.contracts.requests import Sample
from twinflow.engine import base
from twinflow.rpc.convert import sample_to_pb
from twinflow.rpc.v1 import engine_pb2 as pb


async def test_session_lost_while_pulling(pair: Pair) -> None:
    """The prefill side ends the session: one clear error, leases ended, and the next request opens a new session."""
    pair.d_engine.hold("pull")
    pair.router.submit(submit("a", pair.prefill))
    await until(lambda: "PrefillFinished" in pair.d_engine.kinds("a"))
    pair.p_role._close_sessions()
    last = await pair.router.end_of("a")
    assert last.error.reason == "handoff_failed"
    assert "p0" in last.error.message
    await until(lambda: pair.quiet)
    assert pair.p_engine.kinds("a") == ["Submit", "EndLease"]
    assert "Confirm" not in pair.d_engine.kinds("a")
    assert [g.key for g in pair.d_engine.sent(base.PeerGone)] == [pair.p_role.arena.key]
    pair.d_engine.go("pull")
    pair.router.submit(submit("b", pair.prefill))
    assert (await pair.router.end_of("b")).samples


async def test_engine_of_the_prefill_worker_fails_a_request(pair: Pair) -> None:
    pair.p_engine.hold("first")
    pair.router.submit(submit("a", pair.prefill))
    await until(lambda: "BlocksAnnounced" in pair.d_engine.kinds("a"))
    pair.p_engine._end(
        pair.p_engine.running["a"], base.Done("a", base.RequestStats(), "no_capacity", "no memory for it")
    )
    last = await pair.router.end_of("a")
    assert (last.error.reason, last.error.message) == ("no_capacity", "prefill worker p0: no memory for it")
    await until(lambda: pair.quiet)


async def test_engine_of_the_decode_worker_fails_a_request(pair: Pair) -> None:
    pair.p_engine.hold("first")
    pair.router.submit(submit("a", pair.prefill))
    await until(lambda: "BlocksAnnounced" in pair.d_engine.kinds("a"))
    pair.d_engine._end(
        pair.d_engine.running["a"], base.Done("a", base.RequestStats(), "too_long", "64 > 32", "max_tokens")
    )
    last = await pair.router.end_of("a")
    assert (last.error.reason, last.error.param) == ("too_long", "max_tokens")
    await until(lambda: pair.quiet)
    assert pair.p_engine.kinds("a") == ["Submit", "Cancel"]


async def test_prefill_worker_restarts(opened) -> None:
    d_engine = FakeEngine()
    d, d_role = await opened.enter_async_context(decode_front(d_engine))
    router = RouterClient(d.address)
    opened.push_async_callback(router.close)
    async with prefill_front(FakeEngine()) as (p, _):
        router.submit(submit("a", candidate(p)))
        await router.end_of("a")
        port, old = int(p.address.rsplit(":")[-1]), candidate(p)
    await until(lambda: not d_role.peers.sessions)
    p, p_role = await opened.enter_async_context(prefill_front(FakeEngine(), port=port))
    assert old.incarnation != p.incarnation
    router.submit(submit("b", old, candidate(p)))  # the router's record of it is old at first
    last = await router.end_of("b")
    assert (last.stats.prefill_worker, router.tokens("b")) == ("p0", [token(PROMPT, i) for i in range(4)])
    assert [s.key for s in d_role.peers.sessions] == [("p0", p.incarnation)]
    assert len(p_role.sessions) == 1


@pytest.fixture
async def raw(opened):
    """A decode front, its router, and a raw prefill server."""
    engine = FakeEngine()
    d, role = await opened.enter_async_context(decode_front(engine))
    server = await opened.enter_async_context(PrefillServer().serve())
    router = RouterClient(d.address)
    opened.push_async_callback(router.close)
    router.submit(submit("a", server.candidate()))
    await until(lambda: server.of("open"))
    return engine, role, router, server


def first(finish: str = "") -> dict:
    return {"first_token": pb.FirstToken(id="a", sample=pb.Sample(token_id=5, finish=finish))}


def finish_message() -> pb.Finished:
    return pb.Finished(id="a", first_index=0, blocks=[100, 101, 102], slot=7, tag=pb.StateTag(position=10))


LIES = {
    "blocks-before-accepted": [{"blocks": pb.Blocks(id="a", blocks=[1])}],
    "accepted-twice": [{"accepted": pb.Accepted(id="a", lease_id="l")}] * 2,
    "accepted-without-lease": [{"accepted": pb.Accepted(id="a")}],
    "two-first-tokens": [{"accepted": pb.Accepted(id="a", lease_id="l")}, first(), first()],
    "another-first-token-at-the-end": [
        {"accepted": pb.Accepted(id="a", lease_id="l")},
        first(),
        {"finished": pb.Finished(id="a", blocks=[100, 101, 102], slot=7, first_token=pb.Sample(token_id=5))},
    ],
    "unknown-finish": [{"accepted": pb.Accepted(id="a", lease_id="l")}, first("tired")],
    "confirmed-too-early": [
        {"accepted": pb.Accepted(id="a", lease_id="l")},
        {"confirmed": pb.Confirmed(id="a", lease_id="l", session_epoch=0)},
    ],
}


@pytest.mark.parametrize("lie", LIES)
async def test_contradictions_end_one_request(raw, lie: str) -> None:
    engine, role, router, server = raw
    for message in LIES[lie]:
        for confirmed in [m for m in message.values() if isinstance(m, pb.Confirmed)]:
            confirmed.session_epoch = server.epoch
        server.say(**message)
    last = await router.end_of("a")
    if "accepted" in LIES[lie][0] and LIES[lie][0]["accepted"].lease_id:
        assert last.error.reason in ("handoff_failed", "bad_request")
    else:
        assert last.stats.route == "local"  # nothing was pulled yet
    assert "Confirm" not in engine.kinds("a")
    await until(lambda: [c.id for c in server.of("cancel")] == ["a"])
    assert server.sessions == 1
    assert role.peers.sessions[0].live


@pytest.mark.parametrize("wrong", [{"lease_id": "m"}, {"session_epoch": 1}], ids=["lease", "epoch"])
async def test_wrong_confirmed_is_not_used(raw, wrong: dict) -> None:
    engine, _, router, server = raw
    server.say(accepted=pb.Accepted(id="a", lease_id="l"))
    server.say(**first())
    server.say(finished=finish_message())
    await until(lambda: server.of("pulled"))
    server.say(confirmed=pb.Confirmed(**{"id": "a", "lease_id": "l", "session_epoch": server.epoch, **wrong}))
    last = await router.end_of("a")
    assert "confirmed" in last.error.message
    assert "Confirm" not in engine.kinds("a")


async def test_pulled_names_everything(raw) -> None:
    engine, role, router, server = raw
    server.say(accepted=pb.Accepted(id="a", lease_id="l"))
    server.say(**first())
    server.say(finished=finish_message())
    await until(lambda: server.of("pulled"))
    pulled = server.of("pulled")[0]
    assert (pulled.lease_id, pulled.incarnation, pulled.session_epoch, pulled.generation) == (
        "l",
        "i1",
        server.epoch,
        3,
    )
    assert (list(pulled.blocks), list(pulled.slots)) == ([100, 101, 102], [7])
    server.say(confirmed=pb.Confirmed(id="a", lease_id="l", session_epoch=server.epoch))
    await router.end_of("a")
    assert router.tokens("a")[0] == 5
    assert role.peers.sessions[0].open_handoffs == 0
    assert engine.sent(base.FirstTokenArrived)[0].sample == Sample(5)
    assert sample_to_pb(Sample(5)) == pb.Sample(token_id=5)


async def test_session_lost_before_accepted_runs_here(raw) -> None:
    engine, _, router, server = raw
    server.outbox.close()
    last = await router.end_of("a")
    assert last.stats.route == "local"
    assert engine.kinds("a") == ["Submit", "RunLocal"]
    await until(lambda: True)


async def test_never_accepted_runs_here(raw) -> None:
    _, _, router, server = raw
    last = await router.end_of("a")
    assert "did not accept within 1 s" in last.stats.reason
    assert [c.id for c in server.of("cancel")] == ["a"]
    server.say(accepted=pb.Accepted(id="a", lease_id="late"))
    server.say(**first())
    router.submit(submit("b"))
    await router.end_of("b")


async def test_dead_engine_ends_every_request(pair: Pair) -> None:
    pair.d_engine.hold("tokens")
    pair.router.submit(submit("a"))
    await until(lambda: pair.d_engine.running)
    pair.d_engine.die()
    last = await pair.router.end_of("a")
    assert last.error.reason == "internal"
    with pytest.raises(Exception, match="engine process died"):
        await pair.d.wait()


async def test_dead_engine_of_the_prefill_worker(pair: Pair) -> None:
    pair.p_engine.hold("first")
    pair.router.submit(submit("a", pair.prefill))
    await until(lambda: "BlocksAnnounced" in pair.d_engine.kinds("a"))
    pair.p_engine.die()
    last = await pair.router.end_of("a")
    assert last.error.reason == "handoff_failed"
    assert "prefill worker p0: the engine process died" in last.error.message
    assert not len(pair.p_role.offers)


async def test_health(pair: Pair) -> None:
    for front in (pair.d, pair.p):
        async with aio.insecure_channel(front.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_decode_is_healthy_without_any_prefill_worker() -> None:
    async with decode_front(FakeEngine()) as (front, _), aio.insecure_channel(front.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
