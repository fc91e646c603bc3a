"""A prefill worker whose arena gets a new agent: readers learn of it in their session, and each `Pulled` is checked against
the generation that its lease was granted in."""

import asyncio
from contextlib import AsyncExitStack

from tests.services.cluster import TIMES, DecodeClient, PrefillServer, decode_front, open_message, submit, until
from tests.services.conftest import Pair
from tests.services.fake_engine import SLOT, FakeEngine
from twinflow.engine import base
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.transfer.base import GenerationClosed, GenerationOpened

OPENED = GenerationOpened(4, "p0/new/4", b"new", "asked for")


def generations(pair: Pair, request_id: str) -> list[int]:
    """Of the arenas that the decode engine was told to pull this request from."""
    return [c.peer.generation for c in pair.d_engine.sent(base.PullFrom) if c.id == request_id]


async def renewed(pair: Pair) -> None:
    """The prefill worker's engine has opened generation 4, and the decode worker knows."""
    pair.p_engine.report(OPENED)
    (session,) = pair.d_role.peers.sessions
    await until(lambda: session.arena.generation == 4)


async def test_new_hand_offs_go_to_the_new_generation_and_old_ones_end_in_theirs(pair: Pair) -> None:
    pair.d_engine.hold("pull")
    pair.router.submit(submit("old", pair.prefill))
    await until(lambda: "PrefillFinished" in pair.d_engine.kinds("old"))
    old_key = pair.p_role.arena.key
    await renewed(pair)
    pair.router.submit(submit("new", pair.prefill))
    await until(lambda: "PrefillFinished" in pair.d_engine.kinds("new"))
    assert (generations(pair, "old"), generations(pair, "new")) == ([3], [4])
    arena = pair.d_engine.sent(base.PullFrom)[-1].peer
    assert (arena.agent_name, arena.agent_metadata) == ("p0/new/4", b"new")
    assert not pair.d_engine.sent(base.PeerGone), "somebody still reads through the old one"
    pair.d_engine.go("pull")
    for request_id in ("old", "new"):
        assert (await pair.router.end_of(request_id)).samples, "both are confirmed"
    assert [g.key for g in pair.d_engine.sent(base.PeerGone)] == [old_key]
    await until(lambda: pair.quiet)


async def test_closing_the_old_generation_ends_what_was_leased_in_it(pair: Pair) -> None:
    pair.d_engine.hold("pull")
    pair.router.submit(submit("old", pair.prefill))
    await until(lambda: "PrefillFinished" in pair.d_engine.kinds("old"))
    await renewed(pair)
    pair.router.submit(submit("new", pair.prefill))
    await until(lambda: "PrefillFinished" in pair.d_engine.kinds("new"))
    pair.p_engine.report(GenerationClosed(3, 0, 0))
    last = await pair.router.end_of("old")
    assert "transfer generation 3 was closed" in last.error.message
    assert pair.p_engine.kinds("old")[-1] == "EndLease"
    pair.d_engine.go("pull")
    assert (await pair.router.end_of("new")).samples
    await until(lambda: pair.quiet)


async def test_a_pulled_of_another_generation_is_refused(pair: Pair, opened: AsyncExitStack) -> None:
    client = DecodeClient(pair.p.address, features=("generations",))
    opened.push_async_callback(client.close)
    client.open(open_message("old"))
    await client.wait("finished")
    pair.p_engine.report(OPENED)
    told = await client.wait("renewed")
    assert (told.generation, told.ranks[0].agent_name) == (4, "p0/new/4")
    client.open(open_message("new"))
    await client.wait("finished", 2)
    for request_id, wrong in (("old", 4), ("new", 3)):
        lease = next(a.lease_id for a in client.of("accepted") if a.id == request_id)
        client.pulled(
            id=request_id, lease_id=lease, incarnation=pair.p.incarnation, session_epoch=client.epoch, generation=wrong,
            blocks=[100, 101, 102], slots=[SLOT],
        )  # fmt: skip
    await client.wait("failed", 2)
    assert not client.of("confirmed")
    assert all("generation" in f.error.message for f in client.of("failed"))
    await until(lambda: not len(pair.p_role.offers))


async def test_a_reader_that_does_not_know_gets_a_new_session(pair: Pair, opened: AsyncExitStack) -> None:
    client = DecodeClient(pair.p.address)
    opened.push_async_callback(client.close)
    client.open(open_message("a"))
    await client.wait("finished")
    pair.p_engine.report(OPENED)
    await until(lambda: client.ended is not None)
    assert not client.of("renewed")
    await until(lambda: not len(pair.p_role.offers))
    again = DecodeClient(pair.p.address, epoch=100)
    opened.push_async_callback(again.close)
    assert (await again.wait("hello")).generation == 4


async def test_a_renewal_that_makes_no_sense_ends_the_session(opened: AsyncExitStack) -> None:
    engine = FakeEngine()
    _, role = await opened.enter_async_context(decode_front(engine))
    server = await opened.enter_async_context(PrefillServer().serve())
    await role.peers.get(server.candidate())
    server.say(renewed=pb.Renewed(generation=9))
    await until(lambda: not role.peers.sessions)


async def test_credits_bound_what_is_open_and_keep_the_order(pair: Pair, opened: AsyncExitStack) -> None:
    """The prefill worker gives two; the third waits here and is opened when one of them ends."""
    pair.p_role.credits = 2
    pair.d_engine.hold("pull")
    for name in ("a", "b", "c", "d"):
        pair.router.submit(submit(name, pair.prefill))
    await until(lambda: len(pair.p_role.offers) == 2)
    await until(lambda: all("PrefillFinished" in pair.d_engine.kinds(n) for n in ("a", "b")))
    assert not pair.p_engine.kinds("c")
    pair.router.cancel("a")
    await until(lambda: pair.p_engine.kinds("c"))
    assert not pair.p_engine.kinds("d")
    pair.d_engine.go("pull")
    for name in ("b", "c", "d"):
        last = await pair.router.end_of(name)
        assert (last.stats.route, bool(last.samples)) == ("remote", True)
    await until(lambda: pair.quiet)


async def test_without_a_credit_the_prompt_is_computed_here_in_time(pair: Pair) -> None:
    pair.p_role.credits = 1
    pair.d_engine.hold("pull")
    pair.router.submit(submit("a", pair.prefill))
    await until(lambda: "PrefillFinished" in pair.d_engine.kinds("a"))
    pair.router.submit(submit("b", pair.prefill))
    last = await pair.router.end_of("b")
    assert last.stats.route == "local" and "1 hand-offs open" in last.stats.reason
    pair.d_engine.go("pull")
    assert (await pair.router.end_of("a")).stats.route == "remote"


async def test_a_long_queue_for_credits_is_waited_for_as_long_as_it_moves(pair: Pair) -> None:
    """Each is open for more than half of the time after which nothing moves, so the last one waits for three times that."""
    pair.p_role.credits = 1
    names = ["a", "b", "c", "d", "e", "f"]
    pair.d_engine.one_by_one("pull")
    for name in names:
        pair.router.submit(submit(name, pair.prefill))
    for name in names:
        await until(lambda name=name: "PrefillFinished" in pair.d_engine.kinds(name))
        await asyncio.sleep(0.6 * TIMES.open_s)
        pair.d_engine.pass_one("pull")
        assert (await pair.router.end_of(name)).stats.route == "remote"
    await until(lambda: pair.quiet)


async def test_a_lost_session_lets_go_of_who_waits_for_a_credit(pair: Pair) -> None:
    pair.p_role.credits = 1
    pair.d_engine.hold("pull")
    for name in ("a", "b", "c"):
        pair.router.submit(submit(name, pair.prefill))
    await until(lambda: "PrefillFinished" in pair.d_engine.kinds("a"))
    pair.p_role._close_sessions()
    await pair.router.end_of("a")
    for name in ("b", "c"):
        assert "the session" in (await pair.router.end_of(name, within_s=0.9)).stats.reason
    await until(lambda: pair.quiet)


async def test_a_peer_that_is_refused_is_asked_no_more_while_its_session_lasts(pair: Pair) -> None:
    pair.d_engine.hold("pull")
    pair.router.submit(submit("a", pair.prefill))
    await until(lambda: "PrefillFinished" in pair.d_engine.kinds("a"))
    pair.d_engine.report(base.HandoffLost("a", "incompatible", "p0 is not read: reads take ucx/tcp"))
    await until(lambda: not pair.p_engine.running)
    pair.router.submit(submit("b", pair.prefill))
    last = await pair.router.end_of("b")
    assert last.stats.route == "local" and "reads take ucx/tcp" in last.stats.reason
    assert not pair.p_engine.kinds("b")
    pair.d_role.peers.sessions[0].end("test")
    pair.d_engine.go("pull")
    pair.router.submit(submit("c", pair.prefill))
    assert (await pair.router.end_of("c")).stats.route == "remote"
