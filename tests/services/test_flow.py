"""Requests through real fronts over real gRPC: remote, local, terminal first token, fall-backs, concurrency."""

import asyncio

import pytest

from tests.services.cluster import PROMPT, RouterClient, decode_front, submit, until
from tests.services.conftest import Pair
from tests.services.fake_engine import SLOT, FakeEngine, token
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.workers import Role
from twinflow.engine import base
from twinflow.node.pulse import SessionTimes
from twinflow.rpc.v1 import engine_pb2 as pb

EXPECTED = [token(PROMPT, i) for i in range(4)]


async def test_remote(pair: Pair) -> None:
    pair.router.submit(submit("a", pair.prefill))
    last = await pair.router.end_of("a")
    assert pair.router.tokens("a") == EXPECTED
    assert pair.d_engine.kinds("a") == [
        "Submit", "PullFrom", "BlocksAnnounced", "FirstTokenArrived", "PrefillFinished", "Confirm"
    ]  # fmt: skip
    assert pair.p_engine.kinds("a") == ["Submit", "EndLease"]
    offer = pair.p_engine.sent(base.Submit)[0]
    assert (offer.mode, offer.have_tokens) == (base.Mode.OFFER, 4)
    assert pair.d_engine.sent(base.PullFrom)[0].peer == pair.p_role.arena
    s = last.stats
    assert (s.route, s.prefill_worker, s.decode_worker, s.transport) == ("remote", "p0", "d0", "fake")
    assert (s.prompt_tokens, s.cached_tokens, s.decode_attention_tokens, s.prefill_resumed_tokens) == (10, 2, 4, 2)
    assert (s.blocks_moved, s.slots_moved, dict(s.extra)) == (2, 1, {"prefill_s": 0.25, "pull_s": 0.5})
    assert list(s.prefill_checkpoints) == [2]
    await until(lambda: pair.quiet)


async def test_first_token_is_early(pair: Pair) -> None:
    pair.d_engine.hold("pull")
    pair.p_engine.hold("prefilled")
    pair.router.submit(submit("a", pair.prefill))
    await until(lambda: pair.router.tokens("a") == EXPECTED[:1])
    assert pair.p_engine.kinds("a") == ["Submit"]
    pair.p_engine.go("prefilled")
    await until(lambda: "PrefillFinished" in pair.d_engine.kinds("a"))
    assert pair.router.tokens("a") == EXPECTED[:1]
    pair.d_engine.go("pull")
    await pair.router.end_of("a")
    assert pair.router.tokens("a") == EXPECTED


async def test_nothing_is_used_before_confirmed(pair: Pair) -> None:
    """The engine gets Confirm only after the prefill side has ended the lease it names."""
    seen: list[bool] = []
    pair.d_engine.on_step = lambda step, _: (
        seen.append("EndLease" in pair.p_engine.kinds("a")) if step == "tokens" else None
    )
    pair.router.submit(submit("a", pair.prefill))
    await pair.router.end_of("a")
    assert seen == [True] * 3
    assert SLOT in [pair.d_engine.sent(base.PrefillFinished)[0].slot]


@pytest.mark.parametrize("usable", [6, 9], ids=["suffix-of-4", "suffix-of-1"])
async def test_short_suffix_runs_locally(pair: Pair, usable: int) -> None:
    pair.d_engine.usable = usable
    pair.router.submit(submit("a", pair.prefill))
    last = await pair.router.end_of("a")
    assert pair.router.tokens("a") == EXPECTED
    assert pair.d_engine.kinds("a") == ["Submit", "RunLocal"]
    assert last.stats.route == "local"
    assert pair.p_engine.commands == []


async def test_no_candidates_runs_locally_at_once(pair: Pair) -> None:
    pair.router.submit(submit("a"))
    last = await pair.router.end_of("a")
    assert pair.d_engine.kinds("a") == ["Submit"]
    assert (last.stats.route, last.stats.reason) == ("local", "test")


async def test_aggregated_worker(opened) -> None:
    engine = FakeEngine()
    front, _ = await opened.enter_async_context(decode_front(engine, role=Role.BOTH))
    router = RouterClient(front.address)
    opened.push_async_callback(router.close)
    router.submit(submit("a", pb.Candidate(worker_id="p9", incarnation="x", addresses=["127.0.0.1:1"])))
    await router.end_of("a")
    assert engine.sent(base.Submit)[0].mode is base.Mode.LOCAL
    assert router.of("hello")[0].record.role == "both"


async def test_terminal_first_token_needs_no_pull(pair: Pair) -> None:
    pair.d_engine.hold("pull")
    pair.router.submit(submit("a", pair.prefill, max_tokens=1))
    last = await pair.router.end_of("a")
    assert pair.router.tokens("a") == EXPECTED[:1]
    assert last.samples[0].finish == "length"
    assert last.stats.route == "remote"
    assert "PullDone" not in pair.d_engine.kinds("a")
    await until(lambda: pair.quiet)
    assert pair.p_engine.kinds("a")[-1] in ("EndLease", "Cancel")


async def test_unreachable_candidate_then_the_next(pair: Pair) -> None:
    dead = pb.Candidate(worker_id="p9", incarnation="x", addresses=["127.0.0.1:1"])
    pair.router.submit(submit("a", dead, pair.prefill))
    last = await pair.router.end_of("a")
    assert (pair.router.tokens("a"), last.stats.prefill_worker) == (EXPECTED, "p0")


async def test_nobody_reachable_runs_here_and_says_so(pair: Pair) -> None:
    dead = pb.Candidate(worker_id="p9", incarnation="x", addresses=["127.0.0.1:1"])
    pair.router.submit(submit("a", dead))
    last = await pair.router.end_of("a")
    assert pair.router.tokens("a") == EXPECTED
    assert last.stats.route == "local"
    assert "p9" in last.stats.reason
    assert "UNAVAILABLE" in last.stats.reason


async def test_refused_by_prefill_runs_here(pair: Pair) -> None:
    """More hand-offs than the prefill worker takes."""
    pair.p_engine.hold("offer")
    ids = [f"r{i}" for i in range(9)]
    for request_id in ids:
        pair.router.submit(submit(request_id, pair.prefill))
    await until(lambda: any(pair.router.terminal(request_id) for request_id in ids))
    over = [last for request_id in ids for last in pair.router.terminal(request_id)]  # of the one that came last
    assert ["at most 8" in last.stats.reason for last in over] == [True]
    pair.p_engine.go("offer")
    for request_id in ids:
        await pair.router.end_of(request_id)
        assert pair.router.tokens(request_id) == EXPECTED
    await until(lambda: pair.quiet)


async def test_many_at_once(pair: Pair) -> None:
    prompts = {f"r{i}": pack_tokens(range(i, i + 9 + i % 5)) for i in range(1, 40)}
    for number, (request_id, prompt) in enumerate(prompts.items()):
        chosen = [pair.prefill] if number % 3 else []
        pair.router.submit(submit(request_id, *chosen, prompt=prompt, max_tokens=6))
    for request_id, prompt in prompts.items():
        await pair.router.end_of(request_id, 10)
        assert pair.router.tokens(request_id) == [token(prompt, i) for i in range(6)]
    await until(lambda: pair.quiet)
    assert len(pair.d_role.peers.sessions) == 1


async def test_idle_session_is_closed(opened, pair: Pair) -> None:
    engine = FakeEngine()
    times = SessionTimes(idle_s=0.3)
    front, role = await opened.enter_async_context(decode_front(engine, worker_id="d1", times=times))
    router = RouterClient(front.address)
    opened.push_async_callback(router.close)
    engine.hold("pull")
    router.submit(submit("a", pair.prefill))
    await until(lambda: "PrefillFinished" in engine.kinds("a"))
    await asyncio.sleep(0.5)
    assert len(pair.p_role.sessions) == 1  # a hand-off is open in it
    engine.go("pull")
    assert (await router.end_of("a")).samples
    await until(lambda: not pair.p_role.sessions and not role.peers.sessions)


async def test_session_is_opened_again(pair: Pair) -> None:
    pair.router.submit(submit("a", pair.prefill))
    await pair.router.end_of("a")
    session = pair.d_role.peers.sessions[0]
    session.end("test")
    await until(lambda: not pair.p_role.sessions)
    assert pair.d_engine.sent(base.PeerGone)[0].key == pair.p_role.arena.key
    pair.router.submit(submit("b", pair.prefill))
    await pair.router.end_of("b")
    assert pair.d_role.peers.sessions[0].epoch != session.epoch


async def test_one_message_per_report_with_events_and_load(pair: Pair) -> None:
    events = (
        CacheEvent(1, EventKind.BLOCK_STORED, b"h" * 16, 4),
        CacheEvent(2, EventKind.CHECKPOINT_STORED, b"i" * 16, 6),
    )
    before = len(pair.router.of("step"))
    pair.d_engine.report(events=events)
    step = await pair.router.wait("step", before + 1)
    assert [(e.sequence, e.kind, e.position) for e in step.events] == [
        (1, "block_stored", 4),
        (2, "checkpoint_stored", 6),
    ]
    assert step.load.total_blocks == 64
    pair.router.put(pb.RouterMessage(resync=pb.Resync()))
    assert (await pair.router.wait("snapshot")).sequence == 5
    await asyncio.sleep(0.05)
    assert len(pair.router.of("step")) == before + 1


async def test_a_defect_with_one_token_of_a_step_ends_one_request(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.d_engine.hold("tokens")
    for name in ("a", "b", "c"):
        pair.router.submit(submit(name))
    await until(lambda: len(pair.d_engine.running) == 3)
    stream = next(iter(pair.d.routers._streams))
    real = stream.add_token

    def broken(request_id: str, token_id: int) -> None:
        if request_id == "b":
            raise RuntimeError("a defect")
        real(request_id, token_id)

    with monkeypatch.context() as patch:
        patch.setattr(stream, "add_token", broken)
        pair.d_engine.report(base.Continued(("a", "b", "c", "unknown"), (7, 8, 9, 10)))
        await until(lambda: pair.router.tokens("c") == [9])
        assert pair.router.tokens("a") == [7]
        await until(lambda: pair.d_engine.sent(base.Cancel))
    assert [c.id for c in pair.d_engine.sent(base.Cancel)] == ["b"]
    pair.d_engine.go("tokens")
    for name in ("a", "c"):
        assert (await pair.router.end_of(name)).samples[-1].finish == "length"
