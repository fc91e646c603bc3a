"""What cannot be handled ends the session in which it was said, and nothing else; of one request it ends that request."""

from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from services.decode import report
from services.decode.session import Session
from tests.services.cluster import DecodeClient, PrefillServer, RouterClient, decode_front, open_message, submit, until
from tests.services.conftest import Pair
from tests.services.fake_engine import FakeEngine
from twinflow.rpc.v1 import engine_pb2 as pb


def breaking(id: str, whole: Callable) -> Callable:
    """Fails where an argument has this id."""

    def call(*args: object, **options: object) -> object:
        if id in [getattr(a, "id", a) for a in args]:
            raise RuntimeError("said in private")
        return whole(*args, **options)

    return call


async def second_router(pair: Pair, opened: AsyncExitStack) -> RouterClient:
    other = RouterClient(pair.d.address, "r1")
    opened.push_async_callback(other.close)
    await other.wait("hello")
    return other


async def test_a_router_loses_its_own_stream(pair: Pair, opened: AsyncExitStack, monkeypatch) -> None:
    """It is told why; its requests are cancelled, another router's go on."""
    monkeypatch.setattr(pair.d_role, "cancel", breaking("x", pair.d_role.cancel))
    other = await second_router(pair, opened)
    pair.d_engine.hold("tokens")
    pair.router.submit(submit("a"))
    other.submit(submit("b"))
    await until(lambda: pair.d_engine.running.keys() == {"a", "b"})
    pair.router.cancel("x")
    await until(lambda: pair.router.ended)
    assert pair.router.ended == "INTERNAL: a cancel could not be handled: RuntimeError"
    await until(lambda: pair.d_engine.running.keys() == {"b"})
    pair.d_engine.go("tokens")
    assert not (await other.end_of("b")).HasField("error")
    assert not other.ended


async def test_a_submission_costs_the_others_nothing(pair: Pair, monkeypatch) -> None:
    monkeypatch.setattr(report, "request_from_submit", breaking("x", report.request_from_submit))
    pair.d_engine.hold("tokens")
    pair.router.submit(submit("a"))
    pair.router.submit(submit("x"))
    error = (await pair.router.end_of("x")).error
    assert (error.reason, error.message) == ("internal", "a submit could not be handled: RuntimeError")
    pair.d_engine.go("tokens")
    assert not (await pair.router.end_of("a")).HasField("error")


@pytest.fixture
async def reader(pair: Pair, opened: AsyncExitStack) -> DecodeClient:
    """Raw; hand-off `a` is open."""
    client = DecodeClient(pair.p.address)
    opened.push_async_callback(client.close)
    client.open(open_message("a"))
    await client.wait("accepted")
    return client


async def test_a_reader_loses_its_own_session(pair: Pair, reader: DecodeClient, monkeypatch) -> None:
    """Its leases end with it, as at any end; another decode worker's hand-offs do not notice."""
    monkeypatch.setattr(pair.p_role.offers, "pulled", breaking("a", pair.p_role.offers.pulled))
    reader.pulled(id="a")
    await until(lambda: reader.ended)
    assert reader.ended == "INTERNAL: a pulled could not be handled: RuntimeError"
    await until(lambda: pair.quiet)
    pair.router.submit(submit("b", pair.prefill))
    assert (await pair.router.end_of("b")).stats.route == "remote"


async def test_a_hand_off_costs_the_others_nothing(pair: Pair, reader: DecodeClient, monkeypatch) -> None:
    monkeypatch.setattr(pair.p_role.offers, "open", breaking("x", pair.p_role.offers.open))
    reader.open(open_message("x"))
    failed = await reader.wait("failed")
    assert (failed.id, failed.error.message) == ("x", "the hand-off could not be read")
    await reader.wait("finished")
    assert not reader.ended


async def test_a_prefill_worker_loses_its_session(opened: AsyncExitStack, monkeypatch) -> None:
    """What waits for it runs here, and the next request dials it again."""

    def fail(self: Session, message: pb.Renewed) -> None:
        raise RuntimeError("said in private")

    monkeypatch.setattr(Session, "_renewed", fail)
    d, role = await opened.enter_async_context(decode_front(FakeEngine()))
    server = await opened.enter_async_context(PrefillServer().serve())
    router = RouterClient(d.address)
    opened.push_async_callback(router.close)
    router.submit(submit("a", server.candidate()))
    await until(lambda: server.of("open"))
    server.say(renewed=pb.Renewed())
    last = await router.end_of("a")
    assert last.stats.route == "local" and "a renewed could not be handled: RuntimeError" in last.stats.reason
    await until(lambda: not role.peers.sessions)
    router.submit(submit("b", server.candidate()))
    await until(lambda: server.sessions == 2)
