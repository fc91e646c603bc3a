"""What a front says of its engine's process: to routers with every beat and at once, in its log, in its metrics."""

import contextlib
import logging

import pytest

from tests.services.cluster import (
    DecodeClient,
    RouterClient,
    decode_front,
    open_message,
    prefill_front,
    submit,
    until,
)
from tests.services.fake_engine import FakeEngine
from tests.services.test_metrics import value
from twinflow.node.pulse import ENGINE_SILENCE_S, SessionTimes

SELDOM = SessionTimes(heartbeat_s=30.0, silence_s=90.0)  # beats between which a whole test fits


@pytest.fixture(params=[decode_front, prefill_front], ids=["decode", "prefill"])
def front_of(request: pytest.FixtureRequest):
    return request.param


def told_s(router: RouterClient) -> list[float]:
    return [beat.engine_silent_s for beat in router.of("heartbeat")]


async def test_it_is_told_at_once_and_taken_back(
    front_of, opened: contextlib.AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    front, _ = await opened.enter_async_context(front_of(engine, times=SELDOM))
    router = RouterClient(front.address)
    opened.push_async_callback(router.close)
    await until(lambda: told_s(router) == [0.0])
    engine.unheard_s = 1.5
    await until(lambda: front.silence.silent_s)
    assert told_s(router) == [0.0], "not worth a beat of its own"
    engine.unheard_s = 4.0
    await until(lambda: told_s(router) == [0.0, 4.0])
    assert await value(front, "twinflow_engine_silences_total") == 1

    late = RouterClient(front.address, "r1")  # one that comes meanwhile
    opened.push_async_callback(late.close)
    await until(lambda: told_s(late) == [4.0])
    engine.unheard_s = 0.1
    await until(lambda: told_s(router) == [0.0, 4.0, 0.1] and told_s(late) == [4.0, 0.1])
    assert await value(front, "twinflow_engine_silences_total") == 1
    said = [r.getMessage() for r in caplog.records if r.name == "twinflow.engine.silence"]
    assert [text.rpartition(" ")[0].rstrip(",") for text in said if text] and len(said) == 2
    assert "has said nothing for 4.0 s" in said[0] and "is heard again" in said[1]
    assert all(r.levelno == logging.WARNING for r in caplog.records if r.name == "twinflow.engine.silence")


async def test_every_beat_has_it(opened: contextlib.AsyncExitStack) -> None:
    engine = FakeEngine()
    front, _ = await opened.enter_async_context(decode_front(engine))
    router = RouterClient(front.address)
    opened.push_async_callback(router.close)
    engine.unheard_s = ENGINE_SILENCE_S + 1
    await until(lambda: told_s(router).count(ENGINE_SILENCE_S + 1) >= 3)


async def test_a_front_goes_on_meanwhile(opened: contextlib.AsyncExitStack) -> None:
    """It takes and gives up requests, which the engine hears of once it goes on."""
    engine = FakeEngine()
    engine.hold("tokens")
    front, role = await opened.enter_async_context(decode_front(engine))
    router = RouterClient(front.address)
    opened.push_async_callback(router.close)
    engine.unheard_s = 10.0
    await until(lambda: 10.0 in told_s(router))
    router.submit(submit("r"))
    await until(lambda: len(role))
    router.cancel("r")
    await router.end_of("r")
    await until(lambda: not len(role) and not engine.running)


@pytest.mark.parametrize("computed", [False, True], ids=["being computed", "computed and not yet read"])
async def test_a_prefill_worker_ends_its_hand_offs(opened: contextlib.AsyncExitStack, computed: bool) -> None:
    """Whoever reads from it hears nothing else of it: its session beats on. What was promised is over for good."""
    engine = FakeEngine()
    if not computed:
        engine.hold("offer")
    front, role = await opened.enter_async_context(prefill_front(engine))
    client = DecodeClient(front.address)
    opened.push_async_callback(client.close)
    client.open(open_message("a"))
    await client.wait("finished" if computed else "accepted")
    engine.unheard_s = ENGINE_SILENCE_S + 0.3
    error = (await client.wait("failed")).error
    assert error.reason == "handoff_failed"
    assert "prefill worker p0 has heard nothing from its engine process for 2.3 s" in error.message
    assert not len(role.offers) and client.ended is None, "the session itself is in good health"
    await until(lambda: engine.kinds("a")[-1] == ("EndLease" if computed else "Cancel"))
    lease = client.of("accepted")[0].lease_id
    client.pulled(id="a", lease_id=lease, incarnation=front.incarnation, session_epoch=client.epoch, generation=3)
    assert "not confirmed" in (await client.wait("failed", 2)).error.message

    client.open(open_message("b"))
    assert "has heard nothing from its engine process" in (await client.wait("failed", 3)).error.message
    assert not engine.kinds("b")
    engine.unheard_s = 0.0
    await until(lambda: not front.silence.lasts)
    engine.go("offer")
    client.open(open_message("c"))
    await client.wait("finished", 1 + computed)
