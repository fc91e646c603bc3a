"""The parts that every stream is made of: the outbox, the pulse, the pure decisions."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from services.decode.claim import Kind, decide, needs_match
from twinflow.contracts.errors import BadRequest, Incompatible, Internal
from twinflow.contracts.workers import Role
from twinflow.engine.base import Matched
from twinflow.node.handshake import Layout, negotiate, same_layout
from twinflow.node.outbox import Outbox
from twinflow.node.pulse import Pulse, SessionTimes, listen
from twinflow.rpc.v1 import engine_pb2 as pb

TIMES = SessionTimes(heartbeat_s=0.02, silence_s=0.2)


async def test_outbox_keeps_order_and_ends_after_what_is_queued() -> None:
    outbox: Outbox[int] = Outbox()
    for i in range(5):
        outbox.put(i)
    outbox.close()
    outbox.put(9)
    assert [i async for i in outbox] == [0, 1, 2, 3, 4]
    assert outbox.error is None


async def test_outbox_of_a_peer_that_does_not_read() -> None:
    outbox: Outbox[int] = Outbox(limit=3)
    for i in range(9):
        outbox.put(i)
    assert outbox.closed
    assert outbox.error is not None
    assert "3 messages unread" in outbox.error.message
    assert [i async for i in outbox] == []


async def test_silence() -> None:
    beats: list[int] = []
    begun = time.monotonic()
    await Pulse(TIMES, beats.append).run_until_silence()
    assert time.monotonic() - begun > 0.15
    assert beats[:5] == [1, 2, 3, 4, 5]


async def test_who_is_heard_between_beats_is_not_silent() -> None:
    pulse = Pulse(TIMES, lambda n: None)
    running = asyncio.create_task(pulse.run_until_silence())
    until = time.monotonic() + 3 * TIMES.silence_s
    while time.monotonic() < until:
        await asyncio.sleep(TIMES.heartbeat_s / 5)
        pulse.heard()
    assert not running.done()
    running.cancel()


async def test_own_pause_is_not_the_peers_silence() -> None:
    """While this process is held up it hears nobody; that says nothing about the peer."""
    pulse = Pulse(TIMES, lambda n: None)
    running = asyncio.create_task(pulse.run_until_silence())
    await asyncio.sleep(0.05)
    time.sleep(0.5)  # noqa: ASYNC251
    await asyncio.sleep(0.05)
    assert not running.done()
    await asyncio.wait_for(running, 1.0)


async def messages(*kinds: str) -> AsyncIterator[pb.RouterMessage]:
    for kind in kinds:
        yield pb.RouterMessage(**{kind: {}})


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("said in private"), "RuntimeError"),
        (BadRequest("unknown finish 'tired'"), "unknown finish 'tired'"),
    ],
    ids=["a-defect-here", "what-nobody-knows"],
)
async def test_a_message_that_cannot_be_handled_ends_it(
    error: Exception, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What it said is lost. The log has all of it, the peer its kind and whose text is safe to quote."""
    seen: list[str] = []

    def handle(message: pb.RouterMessage) -> None:
        seen.append(str(message.WhichOneof("message")))
        if seen[-1] == "submit":
            raise error

    with pytest.raises(Internal) as caught:
        await listen(messages("cancel", "submit", "resync"), handle, Pulse(TIMES, lambda n: None), TIMES)
    assert seen == ["cancel", "submit"]
    assert caught.value.message == f"a submit could not be handled: {told}"
    assert str(error) in caplog.text


@pytest.mark.parametrize(
    ("role", "usable", "candidates", "kind"),
    [
        (Role.DECODE, 0, 1, Kind.REMOTE),
        (Role.DECODE, 91, 1, Kind.REMOTE),
        (Role.DECODE, 92, 1, Kind.LOCAL),
        (Role.DECODE, 0, 0, Kind.LOCAL),
        (Role.BOTH, 0, 1, Kind.LOCAL),
    ],
    ids=["nothing-held", "suffix-9", "suffix-8", "nobody-offered", "aggregated"],
)
def test_decide(role: Role, usable: int, candidates: int, kind: Kind) -> None:
    decision = decide(role, Matched("a", (), usable, 0, 100), candidates, local_max_tokens=8)
    assert decision.kind is kind
    assert decision.reason


def test_needs_match() -> None:
    assert needs_match(Role.DECODE, 1)
    assert not needs_match(Role.DECODE, 0)
    assert not needs_match(Role.BOTH, 1)


def test_negotiate() -> None:
    assert negotiate("x", 1, 4) == 1
    with pytest.raises(Incompatible, match="x speaks protocol 2 to 4, this side 1 to 1"):
        negotiate("x", 2, 4)


def test_layouts() -> None:
    same_layout(Layout("d", "f", "one"), Layout("p", "f", "one"))
    with pytest.raises(Incompatible) as caught:
        same_layout(Layout("d", "f", "one"), Layout("p", "g", "two"))
    assert "d has f = one; p has g = two" in caught.value.message
