"""Releases side by side: this one's workers against the frozen protocol of the previous one, and what a hello negotiates."""

from contextlib import AsyncExitStack

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from tests.services.cluster import (
    PROMPT,
    ROOT,
    PrefillServer,
    RouterClient,
    decode_front,
    prefill_front,
    submit,
    until,
)
from tests.services.conftest import Pair
from tests.services.fake_engine import SLOT, FakeEngine, token
from tests.services.previous import Previous, PreviousDecode, PreviousPrefill
from twinflow.contracts.errors import Incompatible
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.requests import Grammar, GrammarKind
from twinflow.engine import base
from twinflow.node.handshake import features, same_verify
from twinflow.rpc import convert
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.transfer.base import GenerationOpened


def test_the_frozen_protocol_is_older() -> None:
    """Else these tests would compare this release with itself."""
    old, new = Previous(), pb.DESCRIPTOR.message_types_by_name
    assert "credits" not in old.HandoffHello.DESCRIPTOR.fields_by_name
    assert "credits" in new["HandoffHello"].fields_by_name
    with pytest.raises(AttributeError, match="Renewed"):
        _ = old.Renewed


def test_nothing_that_the_previous_release_reads_has_changed() -> None:
    """Every field of its hand-off messages and its sessions with routers is still there: same number, type and label."""
    old, new = Previous(), pb.DESCRIPTOR.message_types_by_name
    for name in ("HandoffHello", "HandoffRequest", "HandoffReply", "Open", "Accepted", "Blocks", "FirstToken", "Finished",
                 "Pulled", "Confirmed", "Release", "Failed", "ArenaInfo", "Sampling", "StateTag", "RequestStats",
                 "RouterHello", "WorkerHello", "Submit", "StepReport", "Output", "CacheEvent", "Snapshot"):  # fmt: skip
        for was in getattr(old, name).DESCRIPTOR.fields:
            now = new[name].fields_by_number.get(was.number)
            assert now is not None, f"{name}.{was.name} is gone"
            assert (now.name, now.type, now.is_repeated) == (was.name, was.type, was.is_repeated), f"{name}.{was.name}"


async def test_an_older_decode_worker_is_served(pair: Pair, opened: AsyncExitStack) -> None:
    old = PreviousDecode(pair.p.address)
    opened.push_async_callback(old.close)
    sampling = old.pb.Sampling(max_tokens=4, seed=1)
    old.put(open=old.pb.Open(id="a", prompt=PROMPT, sampling=sampling, root=ROOT))
    await until(lambda: old.of("finished"))
    pulled = old.pb.Pulled(
        id="a", lease_id=old.of("accepted")[0].lease_id, incarnation=pair.p.incarnation, session_epoch=7, generation=3,
        blocks=[100, 101, 102], slots=[SLOT],
    )  # fmt: skip
    old.put(pulled=pulled)
    await until(lambda: old.of("confirmed"))
    assert all(m.WhichOneof("message") for m in old.got), "it is sent nothing that it does not know"
    await until(lambda: pair.quiet)


async def test_an_older_decode_worker_gets_a_new_session_for_a_new_generation(
    pair: Pair, opened: AsyncExitStack
) -> None:
    old = PreviousDecode(pair.p.address)
    opened.push_async_callback(old.close)
    await until(lambda: old.of("hello"))
    pair.p_engine.report(GenerationOpened(4, "p0/x/4", b"new", "asked for"))
    await until(lambda: old.ended is not None)
    assert all(m.WhichOneof("message") for m in old.got)
    again = PreviousDecode(pair.p.address)
    opened.push_async_callback(again.close)
    await until(lambda: again.of("hello"))
    assert (again.of("hello")[0].generation, again.of("hello")[0].ranks[0].agent_name) == (4, "p0/x/4")


async def test_an_older_prefill_worker_is_used(opened: AsyncExitStack) -> None:
    """Also where a checkpoint would be wanted: attention reaches 8, no state is held, and the peer cannot give one."""
    old = await opened.enter_async_context(PreviousPrefill().serve())
    engine = FakeEngine(hold_tokens=8)
    front, _ = await opened.enter_async_context(decode_front(engine, local_max_tokens=2))
    router = RouterClient(front.address)
    opened.push_async_callback(router.close)
    worker_id, incarnation, address = old.candidate()
    router.submit(submit("a", pb.Candidate(worker_id=worker_id, incarnation=incarnation, addresses=[address])))
    last = await router.end_of("a")
    assert (last.error.message, last.stats.route) == ("", "remote")
    assert router.tokens("a") == [5, *(token(PROMPT, k) for k in (1, 2, 3))]
    assert old.of("open")[0].want_checkpoint_at == 0
    (pull,) = engine.sent(base.PullFrom)
    assert (pull.peer.generation, pull.want_checkpoint_at) == (1, 0)
    assert engine.sent(base.PrefillFinished)[0].checkpoint is None


@pytest.mark.parametrize("held", [False, True], ids=["free", "grammar"])
async def test_an_older_prefill_worker_gets_no_reply_that_is_held_to_a_grammar(
    opened: AsyncExitStack, held: bool
) -> None:
    """It would draw the first token of it freely. The prompt is computed here instead."""
    old = await opened.enter_async_context(PreviousPrefill().serve())
    engine = FakeEngine()
    front, _ = await opened.enter_async_context(decode_front(engine, local_max_tokens=2))
    router = RouterClient(front.address)
    opened.push_async_callback(router.close)
    worker_id, incarnation, address = old.candidate()
    message = submit("a", pb.Candidate(worker_id=worker_id, incarnation=incarnation, addresses=[address]))
    if held:
        message.sampling.grammar.CopyFrom(pb.Grammar(kind="regex", text="a+", field="f"))
    router.submit(message)
    last = await router.end_of("a")
    assert (last.error.message, last.stats.route) == ("", "local" if held else "remote")
    assert len(old.of("open")) == (not held) and not last.stats.faulty_prefill_workers
    if held:
        assert "structured outputs" in last.stats.reason
        (sent,) = engine.sent(base.Submit)
        assert sent.request.sampling.grammar == Grammar(GrammarKind.REGEX, "a+", field="f")


@pytest.mark.parametrize(
    "reads", [(), ("columns",), ("columns", "event_columns")], ids=["previous", "columns", "event-columns"]
)
async def test_each_router_gets_cache_events_as_it_reads_them(
    pair: Pair, opened: AsyncExitStack, reads: tuple[str, ...]
) -> None:
    """To one that says nothing all is said in the previous release's words. Others beside it get theirs."""
    kinds = list(EventKind)
    events = tuple(CacheEvent(5 + i, kind, bytes([i]) * 16, 4 * i) for i, kind in enumerate(kinds))
    contents = tuple(CacheEvent(9, kind, bytes([i]) * 16, 4 * i) for i, kind in enumerate(kinds[::2]))
    router = RouterClient(pair.d.address, "r1", **dict.fromkeys(reads, True))
    opened.push_async_callback(router.close)
    await until(lambda: pair.d.routers.connected == 2)
    pair.d_engine.contents = contents
    pair.d_engine.report(events=events)
    pair.d_engine.report(events=())
    router.put(pb.RouterMessage(resync=pb.Resync()))
    snapshot = await router.wait("snapshot")
    (step,) = [s for s in router.of("step") if s.events or s.HasField("event_columns")]
    if "event_columns" in reads:
        assert not step.events and not snapshot.events
        assert list(convert.event_columns_from_pb(step.event_columns)) == list(events)
        found = convert.event_columns_from_pb(snapshot.event_columns)
        assert [e[1:] for e in found] == [e[1:] for e in contents]
    else:
        assert not step.HasField("event_columns") and not snapshot.HasField("event_columns")
        assert list(convert.events_from_pb(step.events)) == list(events)
        old = Previous()
        for message, kind in ((step, old.StepReport), (snapshot, old.Snapshot)):
            known = kind.FromString(message.SerializeToString())
            assert not len(UnknownFieldSet(known)) and len(known.events) == len(message.events)
        assert [(e.kind, e.prefix_hash) for e in snapshot.events] == [
            ("block_stored", bytes(16)), ("checkpoint_stored", b"\1" * 16)
        ]  # fmt: skip
    (beside,) = [s for s in pair.router.of("step") if s.events or s.HasField("event_columns")]
    assert list(convert.events_from_pb(beside.events)) == list(events)


async def test_a_worker_of_this_release_is_asked_for_the_checkpoint(opened: AsyncExitStack) -> None:
    p_engine, d_engine = FakeEngine(), FakeEngine(hold_tokens=8)
    p, _ = await opened.enter_async_context(prefill_front(p_engine))
    d, _ = await opened.enter_async_context(decode_front(d_engine, local_max_tokens=2))
    router = RouterClient(d.address)
    opened.push_async_callback(router.close)
    router.submit(submit("a", pb.Candidate(worker_id=p.worker_id, incarnation=p.incarnation, addresses=[p.address])))
    await router.end_of("a")
    assert p_engine.sent(base.Submit)[0].want_checkpoint_at == 8
    assert d_engine.sent(base.PullFrom)[0].want_checkpoint_at == 8


@pytest.mark.parametrize(("low", "high", "ok"), [(1, 1, True), (1, 9, True), (2, 9, False)])
async def test_protocol_ranges_must_overlap(opened: AsyncExitStack, low: int, high: int, ok: bool) -> None:
    class Other(PrefillServer):
        def hello(self) -> pb.HandoffHello:
            hello = super().hello()
            hello.protocol_min, hello.protocol_max = low, high
            return hello

    server = await opened.enter_async_context(Other().serve())
    _, role = await opened.enter_async_context(decode_front(FakeEngine()))
    if ok:
        assert (await role.peers.get(server.candidate())).live
    else:
        with pytest.raises(Incompatible, match="protocol 2 to 9, this side 1 to 1"):
            await role.peers.get(server.candidate())


def test_checksums_are_agreed_on_by_hello() -> None:
    with pytest.raises(Incompatible, match=r"verify=checksum is set here and not at p0: set engine.verify alike"):
        same_verify("p0", features(verify=True), features(verify=False))
    same_verify("p0", features(verify=True), features(verify=True))
    same_verify("p0", features(verify=False), features(verify=True))
    same_verify("p0 of the previous release", features(verify=True), ())


async def test_a_peer_without_checksums_is_refused_at_the_handshake(opened: AsyncExitStack) -> None:
    p, _ = await opened.enter_async_context(prefill_front(FakeEngine()))
    _, role = await opened.enter_async_context(decode_front(FakeEngine(), verify="checksum"))
    with pytest.raises(Incompatible, match=r"not at p0/.*: set engine.verify alike"):
        await role.peers.get(pb.Candidate(worker_id="p0", incarnation=p.incarnation, addresses=[p.address]))
