"""The first token and the end of the prompt: one message where both are known at once and the reader takes them so."""

from contextlib import AsyncExitStack

import pytest

from tests.services.cluster import PROMPT, DecodeClient, open_message, submit, until
from tests.services.conftest import Pair
from tests.services.fake_engine import token
from tests.services.previous import PreviousDecode
from twinflow.engine import base
from twinflow.node.handshake import FIRST_WITH_END

EXPECTED = [token(PROMPT, i) for i in range(4)]


async def reader(pair: Pair, opened: AsyncExitStack, *features: str) -> DecodeClient:
    client = DecodeClient(pair.p.address, features=features)
    opened.push_async_callback(client.close)
    client.open(open_message("a"))
    return client


async def test_in_one_message(pair: Pair, opened: AsyncExitStack) -> None:
    pair.p_engine.at_once = True
    client = await reader(pair, opened, FIRST_WITH_END)
    finished = await client.wait("finished")
    assert finished.first_token.token_id == EXPECTED[0] and list(finished.blocks) == [102]
    assert not client.of("first_token")


async def test_a_reader_that_does_not_name_it_gets_two(pair: Pair, opened: AsyncExitStack) -> None:
    pair.p_engine.at_once = True
    client = await reader(pair, opened)
    finished = await client.wait("finished")
    assert not finished.HasField("first_token")
    assert [m.sample.token_id for m in client.of("first_token")] == EXPECTED[:1]


async def test_the_previous_release_gets_two(pair: Pair, opened: AsyncExitStack) -> None:
    pair.p_engine.at_once = True
    old = PreviousDecode(pair.p.address)
    opened.push_async_callback(old.close)
    sampling = old.pb.Sampling(max_tokens=4, seed=1)
    message = open_message("a")
    old.put(open=old.pb.Open(id="a", prompt=PROMPT, sampling=sampling, root=message.root))
    await until(lambda: old.of("finished"))
    assert [m.sample.token_id for m in old.of("first_token")] == EXPECTED[:1]


async def test_alone_where_the_end_comes_later(pair: Pair, opened: AsyncExitStack) -> None:
    pair.p_engine.hold("prefilled")
    client = await reader(pair, opened, FIRST_WITH_END)
    assert (await client.wait("first_token")).sample.token_id == EXPECTED[0]
    pair.p_engine.go("prefilled")
    assert not (await client.wait("finished")).HasField("first_token")


async def test_not_at_all_where_the_engine_gave_it_up_in_the_same_breath(pair: Pair, opened: AsyncExitStack) -> None:
    pair.p_engine.breaks = True
    client = await reader(pair, opened, FIRST_WITH_END)
    assert "it broke" in (await client.wait("failed")).error.message
    client.open(open_message("b"))
    await client.wait("failed", 2)
    assert not client.of("first_token")
    await until(lambda: pair.quiet)


async def test_remote(pair: Pair) -> None:
    """The client has it before anything else of the hand-off goes on; the engine is told the end first, which is urgent."""
    pair.p_engine.at_once = True
    pair.d_engine.hold("pull")
    pair.router.submit(submit("a", pair.prefill))
    await until(lambda: pair.router.tokens("a") == EXPECTED[:1])
    pair.d_engine.go("pull")
    last = await pair.router.end_of("a")
    assert pair.router.tokens("a") == EXPECTED
    told = ["Submit", "PullFrom", "BlocksAnnounced", "PrefillFinished", "FirstTokenArrived", "Confirm"]
    assert pair.d_engine.kinds("a") == told
    assert (last.stats.route, last.stats.prefill_resumed_tokens, last.stats.extra["prefill_s"]) == ("remote", 2, 0.25)
    await until(lambda: pair.quiet)


async def test_a_terminal_one_needs_no_pull(pair: Pair) -> None:
    pair.p_engine.at_once = True
    pair.router.submit(submit("a", pair.prefill, max_tokens=1))
    last = await pair.router.end_of("a")
    assert (pair.router.tokens("a"), last.samples[0].finish, last.stats.route) == (EXPECTED[:1], "length", "remote")
    assert pair.d_engine.kinds("a") == ["Submit", "PullFrom", "BlocksAnnounced", "FirstTokenArrived"]
    assert last.stats.extra["prefill_s"] == 0.25
    await until(lambda: pair.quiet)


@pytest.mark.parametrize("what", ["session", "worker"])
async def test_lost_behind_it(pair: Pair, what: str) -> None:
    """What the client has stays, and goes to the next attempt as a forced token."""
    pair.p_engine.at_once = True
    pair.d_engine.hold("pull")
    pair.router.submit(submit("a", pair.prefill))
    await until(lambda: pair.router.tokens("a") == EXPECTED[:1])
    if what == "session":
        pair.d_role.peers.sessions[0].end("cut")
    else:
        pair.p_engine.die()
    await until(lambda: pair.d_engine.sent(base.HandoffFailed))
    assert (await pair.router.end_of("a")).error.reason == "handoff_failed"
    assert pair.router.tokens("a") == EXPECTED[:1]
