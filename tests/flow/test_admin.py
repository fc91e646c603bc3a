"""The admin API against real engines: it tells what is true, and what it changes is what it says."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.flow.conftest import Flow, run_flow
from tests.flow.test_flow import NEW, body, complete, finish, in_phase, text_of
from tests.models.tiny import prompt
from tests.services.test_admin import call
from twinflow.engine.sequence import Phase
from twinflow.rpc.v1 import admin_pb2 as pb
from twinflow.transfer.loopback import Manual

Oracle = Callable[[list[int], int], list[int]]


async def admin(flow: Flow, method: str, **fields: Any) -> dict[str, Any]:
    """Entries by worker; none may have an error."""
    answer = await call(flow.router.grpc_address, method, **fields)
    assert not [w for w in answer.workers if method != "ListWorkers" and w.HasField("error")], answer
    return {w.record.id if method == "ListWorkers" else w.worker_id: w for w in answer.workers}


def start(flow: Flow, ids: list[int], **more: Any) -> "asyncio.Task[httpx.Response]":
    async def post() -> httpx.Response:
        async with httpx.AsyncClient(base_url=flow.url, timeout=30) as http:
            return await http.post("/v1/completions", json=body(ids, **more))

    return asyncio.create_task(post())


def held(match: pb.WorkerMatch) -> tuple[int, list[int]]:
    attention, state = match.groups
    return attention.tokens, list(state.checkpoints)


@pytest.mark.parametrize("length", [65, 200])
async def test_match_equals_what_a_following_request_hits(checkpoint: Path, length: int) -> None:
    async with run_flow(checkpoint) as flow:
        ids = prompt(1, length)
        for reuse in (ids, ids, [*ids, 7, 8, 9], ids[:64]):
            matched = await admin(flow, "MatchPrompt", token_ids=reuse)
            assert await admin(flow, "MatchPrompt", token_ids=reuse) == matched
            stats = (await complete(flow, reuse))["twinflow"]
            assert held(matched["d"]) == (stats["decode_attention_tokens"], stats["decode_checkpoints"])
            assert held(matched["p"]) == (stats["prefill_attention_tokens"], stats["prefill_checkpoints"])
            assert matched["p"].usable_tokens == stats["prefill_resumed_tokens"] == stats["cached_tokens"]
            assert matched["d"].predicted[0].tokens == stats["predicted"]["decode_attention_tokens"]
        await flow.clean()


async def test_match_of_text_and_salt(checkpoint: Path) -> None:
    text = "hello there, how are you? " * 20
    async with run_flow(checkpoint) as flow:
        await complete(flow, text, cache_salt="s")  # type: ignore[arg-type]  # a prompt as text
        tokenizer = Tokenizer.from_file(f"{flow.router.config.model}/tokenizer.json")
        answer = await call(flow.router.grpc_address, "MatchPrompt", text=text, cache_salt="s")
        nobody = await call(flow.router.grpc_address, "MatchPrompt", text=text, cache_salt="s", tenant="team")
        assert not any(g.tokens for w in nobody.workers for g in w.groups)
        assert answer.prompt_tokens == len(tokenizer.encode(text).ids)
        assert [w.groups[0].tokens for w in answer.workers] == [answer.prompt_tokens] * 2
        other = await admin(flow, "MatchPrompt", text=text)
        assert [held(w) for w in other.values()] == [(0, [])] * 2
        await flow.clean()


async def test_capacity_is_what_the_pools_hold(checkpoint: Path) -> None:
    async with run_flow(checkpoint) as flow:
        await complete(flow, prompt(1, 200))
        await flow.clean()
        capacity = await admin(flow, "GetCapacity")
        for name, engine in flow.engines.items():
            layout, counts, stored = engine.model.layout, engine.cache.counts(), engine.cache.stored()
            for g, spec in zip(capacity[name].groups, layout.groups, strict=True):
                c = counts[spec.name]
                told = (g.total_units, g.free_units, g.cached_units, g.held_units, g.doomed_units, g.pinned_units)
                assert told == (c.total, c.free, c.cached, c.held, c.doomed, c.pinned_by_io)
                assert (g.group, g.kind, g.unit_bytes) == (spec.name, spec.kind.value, spec.unit_bytes)
                assert g.stored_units == stored[spec.name] == c.cached > 0
            assert capacity[name].capacity_tokens == counts["attention"].total * layout.block_tokens


@pytest.mark.parametrize("group", ["attention", "state", ""])
async def test_flush_per_group(checkpoint: Path, oracle: Oracle, group: str) -> None:
    async with run_flow(checkpoint) as flow:
        ids = prompt(1, 200)
        await complete(flow, ids)
        await flow.clean()
        before = await admin(flow, "GetCapacity")
        flushed = await admin(flow, "FlushCache", group=group)
        for name, entry in flushed.items():
            cached = {g.group: g.cached_units for g in before[name].groups if group in ("", g.group)}
            assert {g.group: g.units for g in entry.groups} == cached and all(cached.values())
        again = await admin(flow, "FlushCache", group=group)
        assert {g.units for entry in again.values() for g in entry.groups} == {0}
        matched = await admin(flow, "MatchPrompt", token_ids=ids)
        kept = {g.group for g in matched["p"].groups if g.tokens}
        assert kept == {"attention": {"state"}, "state": {"attention"}, "": set()}[group]
        assert [entry.usable_tokens for entry in matched.values()] == [0, 0]
        answer = await complete(flow, ids)
        assert answer["choices"][0]["text"] == text_of(flow, oracle(ids, NEW))
        assert answer["twinflow"]["cached_tokens"] == 0
        await flow.clean()


async def test_flush_leaves_what_runs(checkpoint: Path, oracle: Oracle) -> None:
    reads = Manual()
    async with run_flow(checkpoint, reads) as flow:
        ids = prompt(1, 200)
        running = start(flow, ids)
        await flow.until(in_phase(flow, "p", Phase.LEASED), "a lease")
        await admin(flow, "FlushCache")
        await flow.until(lambda: finish(reads) is None and running.done(), "the request ends")
        answer = (await running).json()
        assert answer["choices"][0]["text"] == text_of(flow, oracle(ids, NEW))
        await flow.clean()


async def test_drain_finishes_what_runs_and_takes_nothing_new(checkpoint: Path, oracle: Oracle) -> None:
    reads = Manual()
    async with run_flow(checkpoint, reads) as flow:
        ids = prompt(1, 200)
        running = start(flow, ids)
        await flow.until(in_phase(flow, "p", Phase.LEASED), "a lease")
        drained = await admin(flow, "Drain")
        assert [(d.draining, d.changed, d.requests, d.leases) for d in (drained["d"], drained["p"])] == [
            (True, True, 1, 0),
            (True, True, 0, 1),
        ]
        assert all(w.record.draining for w in (await admin(flow, "ListWorkers")).values())
        assert [r.draining for r in flow.router.registry.records().values()] == [True, True]
        refused = await start(flow, ids)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_decode_worker")
        assert len(flow.engines["d"].sequences) == 1
        await flow.until(lambda: finish(reads) is None and running.done(), "the request ends")
        assert (await running).json()["choices"][0]["text"] == text_of(flow, oracle(ids, NEW))
        await flow.clean()
        left = await admin(flow, "Drain")
        assert {(d.draining, d.changed, d.requests, d.leases) for d in left.values()} == {(True, False, 0, 0)}
        assert {(u.draining, u.changed) for u in (await admin(flow, "Undrain")).values()} == {(False, True)}
        served = start(flow, ids)
        await flow.until(lambda: finish(reads) is None and served.done(), "the next request is served")
        assert (await served).status_code == 200


async def test_with_its_prefill_worker_drained_the_decode_worker_serves_alone(checkpoint: Path, oracle: Oracle) -> None:
    async with run_flow(checkpoint) as flow:
        await admin(flow, "Drain", worker_id="p")
        ids = prompt(1, 200)
        answer = await complete(flow, ids)
        assert answer["twinflow"]["route"] == "local"
        assert answer["choices"][0]["text"] == text_of(flow, oracle(ids, NEW))
        await flow.clean()


@pytest.mark.parametrize("phase", ["hand-off", "decode"])
@pytest.mark.parametrize("at", ["", "d", "p"], ids=["everywhere", "decode worker", "prefill worker"])
async def test_cancel_leaves_workers_clean(checkpoint: Path, oracle: Oracle, phase: str, at: str) -> None:
    reads = Manual()
    async with run_flow(checkpoint, reads) as flow:
        running = start(flow, prompt(1, 200), max_tokens=1200)
        moment = in_phase(flow, "p", Phase.LEASED) if phase == "hand-off" else in_phase(flow, "d", Phase.RUNNING)
        await flow.until(lambda: (phase == "hand-off" or finish(reads) is None) and moment(), phase)
        listed = await admin(flow, "ListRequests")
        (request,) = listed["d"].requests
        assert (request.mode, request.prompt_tokens, request.prefill_worker) == ("claim", 200, "p")
        if phase == "hand-off":
            assert [(x.reader, x.prefilled, x.blocks, x.slots) for x in listed["p"].leases] == [("d", True, 4, 1)]
        ended = await admin(flow, "CancelRequest", worker_id=at, request_id=request.id)
        assert all(set(e.cancelled) <= {request.id} for e in ended.values())
        if at == "p" and phase == "decode":  # its part is long over
            assert not ended["p"].cancelled and not running.done()
            await admin(flow, "CancelRequest", request_id=request.id)
        await flow.until(lambda: finish(reads) is None and running.done(), "the client is answered")
        answer = await running
        assert answer.json()["error"]["code"] == "cancelled", answer.text
        await flow.clean()
        again = await admin(flow, "CancelRequest", request_id=request.id)
        assert not [id for e in again.values() for id in e.cancelled]
        assert not [r for w in (await admin(flow, "ListRequests")).values() for r in [*w.requests, *w.leases]]
        ids = prompt(2, 100)
        served = start(flow, ids)
        await flow.until(lambda: finish(reads) is None and served.done(), "the next request is served")
        assert (await served).json()["choices"][0]["text"] == text_of(flow, oracle(ids, NEW))
        await flow.clean()
