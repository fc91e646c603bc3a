"""A cancel in every phase of a remote request leaves nothing on either side; so does the end of the router's stream."""

import asyncio

import pytest

from tests.services.cluster import TIMES, PrefillServer, RouterClient, submit, until
from tests.services.conftest import Pair
from twinflow.rpc.v1 import engine_pb2 as pb

# phase → (engine that is held, step it is held at, when to cancel)
PHASES = {
    "before-matched": ("d", "match", lambda p: p.d_engine.running),
    "after-open": ("p", "offer", lambda p: p.p_engine.running),
    "blocks-announced": ("p", "first", lambda p: "BlocksAnnounced" in p.d_engine.kinds("a")),
    "after-first-token": ("p", "prefilled", lambda p: p.router.tokens("a")),
    "pulling": ("d", "pull", lambda p: "PrefillFinished" in p.d_engine.kinds("a")),
    "decoding": ("d", "tokens", lambda p: "Confirm" in p.d_engine.kinds("a")),
}


@pytest.mark.parametrize("how", ["cancel", "stream-end"])
@pytest.mark.parametrize("phase", PHASES)
async def test_cancel(pair: Pair, phase: str, how: str) -> None:
    side, step, reached = PHASES[phase]
    (pair.d_engine if side == "d" else pair.p_engine).hold(step)
    pair.router.submit(submit("a", pair.prefill))
    await until(lambda: reached(pair))
    if how == "cancel":
        pair.router.cancel("a")
        last = await pair.router.end_of("a")
        assert last.error.reason == "cancelled"
    else:
        await pair.router.close()
    await until(lambda: pair.quiet)
    assert "Cancel" in pair.d_engine.kinds("a")
    if "Submit" in pair.p_engine.kinds("a"):
        assert pair.p_engine.kinds("a")[-1] in ("Cancel", "EndLease")
        assert len(pair.p_engine.kinds("a")) == 2
    assert (phase == "decoding") == ("Confirm" in pair.d_engine.kinds("a"))


async def test_cancel_while_a_prefill_worker_is_silent(pair: Pair, opened) -> None:
    """It never answers Open: the cancel does not wait for it, and nobody else is asked afterwards."""
    server = await opened.enter_async_context(PrefillServer().serve())
    pair.router.submit(submit("a", server.candidate(), pair.prefill))
    await until(lambda: server.of("open"))
    pair.router.cancel("a")
    await pair.router.end_of("a")
    await until(lambda: [c.id for c in server.of("cancel")] == ["a"])
    assert pair.quiet
    await asyncio.sleep(TIMES.open_s + 0.2)
    assert pair.d_engine.kinds("a") == ["Submit", "Cancel"]
    assert pair.p_engine.commands == []


async def test_cancel_of_unknown_or_foreign_requests_is_ignored(pair: Pair, opened) -> None:
    other = RouterClient(pair.d.address, "r1")
    opened.push_async_callback(other.close)
    pair.d_engine.hold("tokens")
    pair.router.submit(submit("a"))
    await until(lambda: pair.d_engine.running)
    other.cancel("a")
    other.cancel("nobody")
    other.submit(submit("a"))
    assert (await other.end_of("a")).error.reason == "bad_request"
    pair.router.submit(submit("a"))  # twice on its own stream: once
    pair.router.submit(submit("after", prompt=b""))
    await pair.router.end_of("after")
    pair.d_engine.go("tokens")
    await pair.router.end_of("a")
    assert pair.d_engine.kinds("a") == ["Submit"]


async def test_other_requests_go_on(pair: Pair) -> None:
    pair.d_engine.hold("tokens")
    for request_id in ("a", "b"):
        pair.router.submit(submit(request_id, pair.prefill))
    await until(lambda: "Confirm" in pair.d_engine.kinds("a") and "Confirm" in pair.d_engine.kinds("b"))
    pair.router.cancel("a")
    await pair.router.end_of("a")
    pair.d_engine.go("tokens")
    last = await pair.router.end_of("b")
    assert last.samples[0].finish == "length"


async def test_bad_requests_are_refused_by_name(pair: Pair) -> None:
    bad = {
        "ids": (pb.Submit(prompt=b"\1\0\0"), "prompt"),
        "empty": (pb.Submit(prompt=b""), "prompt"),
        "vocabulary": (pb.Submit(prompt=(1000).to_bytes(4, "little")), "prompt"),
        "root": (pb.Submit(root=b"short"), "root"),
        "long": (pb.Submit(sampling=pb.Sampling(max_tokens=600)), "max_tokens"),
        "nothing": (pb.Submit(sampling=pb.Sampling(max_tokens=0)), "max_tokens"),
    }
    for name, (change, param) in bad.items():
        message = submit(name)
        for field, value in change.ListFields():
            if field.name == "sampling":
                message.sampling.CopyFrom(value)
            else:
                setattr(message, field.name, value)
        if name == "empty":
            message.prompt = b""
        pair.router.submit(message)
        last = await pair.router.end_of(name)
        assert last.error.param == param, name
    assert "512" in pair.router.terminal("long")[0].error.message
    assert pair.d_engine.commands == []
    pair.router.submit(submit("good"))
    assert (await pair.router.end_of("good")).samples


async def test_prefill_workers_take_no_requests(pair: Pair, opened) -> None:
    router = RouterClient(pair.p.address)
    opened.push_async_callback(router.close)
    router.submit(submit("a"))
    last = await router.end_of("a")
    assert last.error.reason == "unsupported"
    assert router.of("hello")[0].record.role == "prefill"
