"""What a prefill front confirms, refuses and ends, told by a raw decode worker; hellos and layouts."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.services.cluster import (
    DecodeClient,
    PrefillServer,
    RouterClient,
    decode_front,
    open_message,
    prefill_front,
    submit,
    until,
)
from tests.services.conftest import Pair
from tests.services.fake_engine import SLOT, FakeEngine
from twinflow.engine import base
from twinflow.engine.config import EngineConfig
from twinflow.node.outbox import Outbox
from twinflow.node.pulse import SessionTimes, kind_of
from twinflow.node.registry.direct import DirectRegistry
from twinflow.rpc.channel import bind, new_server
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as pb_grpc


async def ready_to_confirm(pair: Pair, opened, **options) -> tuple[DecodeClient, dict]:
    """A raw decode worker whose hand-off is finished, and the `Pulled` that would be right."""
    client = DecodeClient(pair.p.address, **options)
    opened.push_async_callback(client.close)
    client.open(open_message("a"))
    await client.wait("finished")
    right = {
        "id": "a", "lease_id": client.of("accepted")[0].lease_id, "incarnation": pair.p.incarnation,
        "session_epoch": client.epoch, "generation": 3, "blocks": [100, 101, 102], "slots": [SLOT],
    }  # fmt: skip
    return client, right


async def test_confirmed(pair: Pair, opened) -> None:
    client, right = await ready_to_confirm(pair, opened)
    blocks = [(m.first_index, list(m.blocks)) for m in client.of("blocks")]
    assert blocks == [(0, [100]), (1, [101])]
    finished = client.of("finished")[0]
    assert (finished.first_index, list(finished.blocks), finished.slot) == (2, [102], SLOT)
    client.pulled(**right)
    confirmed = await client.wait("confirmed")
    assert (confirmed.id, confirmed.lease_id, confirmed.session_epoch) == ("a", right["lease_id"], client.epoch)
    await until(lambda: pair.quiet)
    assert pair.p_engine.kinds("a") == ["Submit", "EndLease"]
    client.pulled(**right)  # the lease has ended
    assert "lease" in (await client.wait("failed")).error.message


async def test_a_confirmation_is_on_its_way_before_the_engine_is_told(
    pair: Pair, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader waits for the one, nobody for the other."""
    told: list[list[str]] = []
    iterate = Outbox.__aiter__

    async def noted(outbox: Outbox) -> AsyncIterator:
        async for message in iterate(outbox):
            if kind_of(message) == "confirmed":
                told.append(pair.p_engine.kinds("a"))
            yield message

    monkeypatch.setattr(Outbox, "__aiter__", noted)
    client, right = await ready_to_confirm(pair, opened)
    client.pulled(**right)
    await client.wait("confirmed")
    await until(lambda: pair.quiet)
    assert told == [["Submit"]] and pair.p_engine.kinds("a") == ["Submit", "EndLease"]


WRONG = {
    "incarnation": {"incarnation": "another"},
    "session": {"session_epoch": 98},
    "lease": {"lease_id": "never"},
    "generation": {"generation": 4},
    "not_offered": {"blocks": [100, 101, 103]},
    "not_offered-slot": {"slots": [SLOT + 1]},
}


@pytest.mark.parametrize("what", WRONG)
async def test_wrong_pulled_is_refused(pair: Pair, opened, what: str) -> None:
    client, right = await ready_to_confirm(pair, opened)
    client.pulled(**{**right, **WRONG[what]})
    failed = await client.wait("failed")
    assert failed.error.reason == "handoff_failed"
    assert f"({what.removesuffix('-slot')})" in failed.error.message
    await until(lambda: pair.quiet)
    assert client.of("confirmed") == []
    assert pair.p_engine.kinds("a") == ["Submit", "EndLease"]


async def test_lease_of_another_handoff_is_refused(pair: Pair, opened) -> None:
    client, right = await ready_to_confirm(pair, opened)
    client.open(open_message("b"))
    await client.wait("finished", 2)
    client.pulled(**{**right, "id": "b"})
    assert (await client.wait("failed")).id == "b"
    client.pulled(**right)
    assert (await client.wait("confirmed")).id == "a"


async def test_pulled_over_another_session_is_refused(pair: Pair, opened) -> None:
    _, right = await ready_to_confirm(pair, opened)
    thief = DecodeClient(pair.p.address, worker_id="dy", epoch=77)
    opened.push_async_callback(thief.close)
    await thief.wait("hello")
    thief.pulled(**right)
    assert "(session)" in (await thief.wait("failed")).error.message
    assert len(pair.p_role.offers) == 1


async def test_new_session_ends_the_leases_of_the_old_one(pair: Pair, opened) -> None:
    client, right = await ready_to_confirm(pair, opened)
    again = DecodeClient(pair.p.address, incarnation="i2", epoch=100)
    opened.push_async_callback(again.close)
    await again.wait("hello")
    await until(lambda: client.ended is not None and pair.quiet)
    again.pulled(**{**right, "session_epoch": 100})
    assert "(lease)" in (await again.wait("failed")).error.message
    assert len(pair.p_role.sessions) == 1


async def test_session_end_ends_leases(pair: Pair, opened) -> None:
    client, _ = await ready_to_confirm(pair, opened)
    pair.p_engine.hold("offer")
    client.open(open_message("b"))
    await client.wait("accepted", 2)
    await client.close()
    await until(lambda: pair.quiet)
    assert pair.p_engine.kinds("a") == ["Submit", "EndLease"]
    assert pair.p_engine.kinds("b") == ["Submit", "Cancel"]


async def test_lease_age(opened) -> None:
    engine = FakeEngine()
    times = SessionTimes(lease_s=0.2)
    front, role = await opened.enter_async_context(prefill_front(engine, times=times))
    client = DecodeClient(front.address)
    opened.push_async_callback(client.close)
    client.open(open_message("a"))
    failed = await client.wait("failed")
    assert "0.2 s" in failed.error.message
    assert (len(role.offers), engine.kinds("a")) == (0, ["Submit", "EndLease"])


async def test_newer_attempt_supersedes(pair: Pair, opened) -> None:
    client = DecodeClient(pair.p.address)
    opened.push_async_callback(client.close)
    pair.p_engine.hold("offer")
    client.open(open_message("a", idempotency_id="x"))
    client.open(open_message("a", idempotency_id="x"))  # the same Open again: once
    client.open(open_message("b", idempotency_id="x"))
    assert (await client.wait("failed")).id == "a"
    pair.p_engine.go("offer")
    assert (await client.wait("finished")).id == "b"
    assert [a.id for a in client.of("accepted")] == ["a", "b"]


async def test_bad_messages_do_not_stop_the_session(pair: Pair, opened) -> None:
    client = DecodeClient(pair.p.address)
    opened.push_async_callback(client.close)
    client.put(pb.HandoffRequest())
    client.put(pb.HandoffRequest(hello=pb.HandoffHello()))
    client.put(pb.HandoffRequest(release=pb.Release(id="nobody")))
    client.open(open_message("odd", have_tokens=3))
    client.open(open_message("much", have_tokens=12))
    client.open(open_message("empty", prompt=b""))
    client.open(open_message("ids", prompt=b"abc"))
    failed = {f.id: f.error.param for f in [await client.wait("failed", n) for n in range(1, 5)]}
    assert failed == {"odd": "have_tokens", "much": "have_tokens", "empty": "prompt", "ids": "prompt"}
    client.open(open_message("a"))
    await client.wait("finished")


async def test_layouts_differ(opened) -> None:
    """Refused at the hello with both sides printed; the request then runs on the decode worker."""
    p_engine, d_engine = FakeEngine(fingerprint="a" * 32), FakeEngine(fingerprint="b" * 32)
    p, p_role = await opened.enter_async_context(prefill_front(p_engine))
    d, _ = await opened.enter_async_context(decode_front(d_engine))
    router = RouterClient(d.address)
    opened.push_async_callback(router.close)
    router.submit(submit("a", pb.Candidate(worker_id="p0", incarnation=p.incarnation, addresses=[p.address])))
    last = await router.end_of("a")
    assert last.stats.route == "local"
    for side in ("p0", "d0", '{"layout of": "' + "a" * 32, '{"layout of": "' + "b" * 32):
        assert side in last.stats.reason
    assert p_role.sessions == ()


async def test_layout_is_checked_by_the_prefill_side_too(pair: Pair, opened) -> None:
    client = DecodeClient(pair.p.address, fingerprint="g" * 32)
    opened.push_async_callback(client.close)
    error = (await client.wait("hello")).error
    assert error.reason == "incompatible"
    assert "layout of " + "g" * 32 in error.message
    assert '{"layout of": "' + "f" * 32 in error.message
    await until(lambda: client.ended)
    assert pair.p_role.sessions == ()


async def test_hellos_are_checked(pair: Pair, opened) -> None:
    for name, hello in {
        "epoch": pb.HandoffHello(worker_id="dx", incarnation="i", fingerprint="f" * 32, protocol_min=1, protocol_max=1),
        "protocol": pb.HandoffHello(
            worker_id="dx", incarnation="i", session_epoch=1, fingerprint="f" * 32, protocol_min=7, protocol_max=9
        ),
    }.items():
        client = DecodeClient(pair.p.address)
        opened.push_async_callback(client.close)
        client.outbox._waiting[0] = pb.HandoffRequest(hello=hello)
        answer = await client.wait("hello")
        assert name in answer.error.message
        await until(lambda c=client: c.ended)
    silent = DecodeClient(pair.p.address)
    opened.push_async_callback(silent.close)
    silent.outbox._waiting.clear()
    silent.mute = True
    assert "no hello" in (await silent.wait("hello")).error.message


async def test_router_hello_is_checked(pair: Pair, opened) -> None:
    router = RouterClient(pair.d.address)
    opened.push_async_callback(router.close)
    router.outbox._waiting[0] = pb.RouterMessage(hello=pb.RouterHello(router_id="r9", protocol_min=5, protocol_max=6))
    hello = await router.wait("hello")
    assert (hello.protocol, hello.error.reason) == (0, "incompatible")
    assert "5 to 6" in hello.error.message


async def test_silence_is_noticed_within_three_seconds(opened) -> None:
    """With the default times, on both sides at once: a prefill worker, a decode worker and a router that stop talking."""
    d_engine, p_engine = FakeEngine(), FakeEngine()
    d, d_role = await opened.enter_async_context(decode_front(d_engine, times=SessionTimes()))
    p, p_role = await opened.enter_async_context(prefill_front(p_engine, times=SessionTimes()))
    server = await opened.enter_async_context(PrefillServer().serve())
    router, silent_router = RouterClient(d.address), RouterClient(d.address, "r1")
    client = DecodeClient(p.address)
    for stream in (router, silent_router, client):
        opened.push_async_callback(stream.close)
    d_engine.hold("tokens")
    router.submit(submit("a", server.candidate()))
    silent_router.submit(submit("b"))
    client.open(open_message("c"))
    await until(lambda: server.of("open") and d_engine.kinds("b"))
    server.say(accepted=pb.Accepted(id="a", lease_id="l"))
    await client.wait("finished")
    server.mute = client.mute = silent_router.mute = True
    stopped = time.monotonic()
    last = await router.end_of("a")
    assert last.error.reason == "handoff_failed"
    assert "silent" in last.error.message
    await until(lambda: not len(p_role.offers) and not len(d_role))
    assert 2.0 < time.monotonic() - stopped < 6  # 3 s since the last message, plus what a busy machine takes
    assert p_engine.kinds("c") == ["Submit", "EndLease"]
    assert d_engine.kinds("b") == ["Submit", "Cancel"]


async def test_registers_only_after_the_engine_is_ready(opened) -> None:
    registry, server = DirectRegistry(), new_server()
    pb_grpc.add_RegistryServicer_to_server(registry, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    opened.push_async_callback(server.stop, 0)
    loaded = asyncio.Event()

    class SlowEngine(FakeEngine):
        async def start(self, config: EngineConfig) -> base.Ready:
            await loaded.wait()
            return await super().start(config)

    async def serve() -> None:
        async with decode_front(SlowEngine(), router=(f"127.0.0.1:{port}",)):
            await asyncio.get_running_loop().create_future()

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0.2)
    assert registry.records() == {}
    loaded.set()
    await until(lambda: "d0" in registry.records())
    record = registry.records()["d0"]
    assert (record.role.value, record.model, record.block_tokens, record.max_request_tokens) == (
        "decode",
        "fake",
        4,
        512,
    )
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await until(lambda: registry.records() == {})


async def test_a_peer_on_several_ranks_is_refused_at_the_handshake(opened) -> None:
    """Slices of unequal tensor-parallel sizes are not moved: nothing is opened there, and the request runs here."""
    server = await opened.enter_async_context(PrefillServer().serve())
    hello = server.hello

    def on_two() -> pb.HandoffHello:
        made = hello()
        made.ranks.add()
        return made

    server.hello = on_two  # type: ignore[method-assign]
    d, _ = await opened.enter_async_context(decode_front(FakeEngine()))
    router = RouterClient(d.address)
    opened.push_async_callback(router.close)
    router.submit(submit("a", server.candidate()))
    last = await router.end_of("a")
    assert (last.error.reason, last.stats.route) == ("", "local")
    assert "px lies on 2 ranks, this worker on 1" in last.stats.reason
    assert server.of("open") == []
