"""The router's admin API: fan-out to fake workers, of which some are slow, dead, wrong or without the service."""

import asyncio
import dataclasses
import socket
import time

import pytest

from services.router.dispatch.base import WorkerLost
from services.router.view.prompt import PromptKeys
from tests.router.conftest import Cluster, running, until
from tests.router.fake_admin import FakeAdmin
from tests.router.fake_worker import FakeWorker
from tests.services.test_admin import NEEDS, RPCS, call, check_reflection_and_health
from twinflow.contracts.errors import BadRequest, Draining, NoCapacity, UnknownWorker
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.workers import Role
from twinflow.rpc.channel import open_channel

WAIT_S = 1.0  # what `impatient` gives a worker: a healthy one on a busy machine has to answer within it too
HUNG_S = 60.0


@pytest.fixture
async def cluster(model_folder):
    async with running(model_folder, admin_s=HUNG_S) as c:
        yield c


@pytest.fixture
async def impatient(model_folder):
    async with running(model_folder, admin_s=WAIT_S) as c:
        yield c


async def add(cluster: Cluster, id: str, role: Role = Role.DECODE) -> FakeAdmin:
    worker = FakeWorker("toy", id, role)
    admin = FakeAdmin(worker)
    await cluster.add(worker)
    return admin


async def ask(cluster: Cluster, method: str, **fields):
    return await call(cluster.router.grpc_address, method, **(NEEDS.get(method, {}) | fields))


@pytest.mark.parametrize("method", RPCS)
async def test_every_rpc_twice_gives_the_same(cluster, method):
    d, p = await add(cluster, "d0"), await add(cluster, "p0", Role.PREFILL)
    answers = [await ask(cluster, method) for _ in range(3)]
    assert answers[1] == answers[2]
    ids = [w.record.id if method == "ListWorkers" else w.worker_id for w in answers[0].workers]
    assert ids == ["d0", "p0"]
    named = await ask(cluster, method, worker_id="p0")
    assert list(named.workers) == [answers[1].workers[1]]
    asked = 0 if method == "ListWorkers" else 3
    assert (len(d.calls), len(p.calls)) == (asked, asked and asked + 1)
    assert all(request.worker_id == "p0" for _, request in p.calls)


@pytest.mark.parametrize("method", RPCS)
async def test_an_unknown_worker_is_told_who_is_known(cluster, method):
    with pytest.raises(UnknownWorker, match=r"unknown worker 'x' \(known: none\)"):
        await ask(cluster, method, worker_id="x")
    await add(cluster, "d0")
    await add(cluster, "d1")
    with pytest.raises(UnknownWorker, match=r"unknown worker 'x' \(known: d0, d1\)"):
        await ask(cluster, method, worker_id="x")


@pytest.mark.parametrize("method", [m for m in RPCS if m != "ListWorkers"])
async def test_slow_dead_and_failing_workers_have_an_entry_each(impatient, method):
    await add(impatient, "good")
    slow, failing, dead = [await add(impatient, id) for id in ("slow", "failing", "dead")]
    slow.delay_s = HUNG_S
    failing.error = BadRequest("not today")
    impatient.router.view.put(_moved(dead.worker))
    await impatient.add(FakeWorker("toy", "old"))  # a release without the service
    begun = time.monotonic()
    answer = await ask(impatient, method)
    assert time.monotonic() - begun < HUNG_S / 2
    errors = {w.worker_id: (w.error.reason, w.error.message) for w in answer.workers}
    assert list(errors) == ["dead", "failing", "good", "old", "slow"]
    assert errors["good"] == ("", "")
    assert errors["failing"] == ("bad_request", "not today")
    assert errors["slow"][0] == "deadline" and "did not answer within 1 s" in errors["slow"][1]
    assert errors["dead"][0] == WorkerLost.reason and "worker dead at 127.0.0.1:1: UNAVAILABLE" in errors["dead"][1]
    assert errors["old"][0] == "unsupported" and "another release" in errors["old"][1]


async def test_a_worker_that_accepts_and_says_nothing_is_waited_for_no_longer(impatient):
    """As a stopped process does: the kernel answers, nobody else."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        admin = await add(impatient, "d0")
        impatient.router.view.put(_moved(admin.worker, silent.getsockname()[1]))
        begun = time.monotonic()
        (entry,) = (await ask(impatient, "GetCapacity")).workers
        assert WAIT_S <= time.monotonic() - begun < HUNG_S / 2
        assert entry.error.reason == "deadline"


def _moved(worker: FakeWorker, port: int = 1):
    """The registry's record, repeated with an address where nobody is."""
    worker.record = dataclasses.replace(worker.record, addresses=(f"127.0.0.1:{port}",))
    return worker.record


async def test_another_worker_at_the_address_is_noticed(cluster):
    """The request names the worker, so that an address that was reused answers for nobody else."""
    admin = await add(cluster, "d0")
    admin.error = UnknownWorker("unknown worker 'd0': this is d9")
    (entry,) = (await ask(cluster, "FlushCache")).workers
    assert (entry.worker_id, entry.error.reason) == ("d0", "unknown_worker")


async def test_the_list_is_the_views(cluster):
    await add(cluster, "d0")
    worker = cluster.workers[0]
    worker.gate = asyncio.Event()
    running = asyncio.create_task(cluster.complete("hello there", max_tokens=3))
    await until(lambda: worker.submits)
    (status,) = (await ask(cluster, "ListWorkers")).workers
    assert (status.record.id, status.record.role, status.record.model) == ("d0", "decode", "toy")
    assert (status.connected, status.active_requests) == (True, 1)
    assert status.queued_prefill_tokens == len(cluster.encode("hello there"))
    worker.gate.set()
    assert (await running).status_code == 200


async def test_a_match_of_text_is_that_of_its_tokens_with_the_prediction(cluster):
    admin = await add(cluster, "d0")
    ids = cluster.encode("hello there, how are you? one two three")
    keys = PromptKeys(pack_tokens(ids))
    blocks = keys.block_hashes(admin.worker.record)
    events = [CacheEvent(i + 1, EventKind.BLOCK_STORED, h, 4 * (i + 1)) for i, h in enumerate(blocks[:2])]
    events.append(CacheEvent(3, EventKind.CHECKPOINT_STORED, blocks[0], 4))
    admin.worker.emit(*events)
    await until(lambda: cluster.router.view.index_entries() == {"d0": 3})
    by_text = await call(cluster.router.grpc_address, "MatchPrompt", text="hello there, how are you? one two three")
    by_ids = await call(cluster.router.grpc_address, "MatchPrompt", token_ids=ids)
    assert by_text == by_ids and by_text.prompt_tokens == len(ids)
    assert [list(request.token_ids) for _, request in admin.calls] == [ids, ids]
    (match,) = by_text.workers
    assert [(g.group, g.kind, g.tokens, list(g.checkpoints)) for g in match.predicted] == [
        ("attention", "attention", 8, []),
        ("state", "state", 4, [4]),
    ]
    salted = await call(cluster.router.grpc_address, "MatchPrompt", token_ids=ids, cache_salt="s")
    assert [g.tokens for g in salted.workers[0].predicted] == [0, 0]
    assert admin.calls[-1][1].cache_salt == "s"
    theirs = PromptKeys(pack_tokens(ids), "team").block_hashes(admin.worker.record)
    admin.worker.emit(CacheEvent(4, EventKind.BLOCK_STORED, theirs[0], 4))
    await until(lambda: cluster.router.view.index_entries() == {"d0": 4})
    of_team = await call(cluster.router.grpc_address, "MatchPrompt", token_ids=ids, tenant="team")
    assert [g.tokens for g in of_team.workers[0].predicted] == [4, 0]
    assert admin.calls[-1][1].tenant == "team"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": []}, "the prompt is empty"),
        ({"text": "hello"}, "not both"),
        ({"token_ids": [1, 4_000_000]}, "token id 4000000 is outside the vocabulary"),
    ],
    ids=["nothing", "both", "vocabulary"],
)
async def test_bad_prompts_ask_nobody(cluster, fields, message):
    admin = await add(cluster, "d0")
    with pytest.raises(BadRequest, match=message):
        await ask(cluster, "MatchPrompt", **fields)
    assert not admin.calls


async def test_a_cancel_without_an_id_asks_nobody(cluster):
    admin = await add(cluster, "d0")
    with pytest.raises(BadRequest, match="no request_id"):
        await ask(cluster, "CancelRequest", request_id="")
    assert not admin.calls


async def test_a_drained_worker_is_not_chosen_from_the_answer_on(cluster):
    await add(cluster, "d0")
    await add(cluster, "d1")
    (drained,) = (await ask(cluster, "Drain", worker_id="d0")).workers
    assert (drained.draining, drained.changed) == (True, True)
    for _ in range(6):
        assert (await cluster.complete("hello", max_tokens=2)).status_code == 200
    assert [len(w.submits) for w in cluster.workers] == [0, 6]
    await ask(cluster, "Drain")
    refused = await cluster.complete("hello", max_tokens=2)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_decode_worker")
    assert "2 draining" in refused.json()["error"]["message"]
    await ask(cluster, "Undrain")
    assert (await cluster.complete("hello", max_tokens=2)).status_code == 200


async def test_a_drain_that_the_registry_never_shows_is_answered_all_the_same(impatient):
    (await add(impatient, "d0")).stubborn = True
    begun = time.monotonic()
    (drained,) = (await ask(impatient, "Drain")).workers
    assert drained.draining and WAIT_S <= time.monotonic() - begun < HUNG_S / 2


async def test_a_drain_that_the_router_has_not_heard_of_moves_the_request(cluster):
    """Chosen while draining: nothing was sent yet, so another worker gets it and the client sees nothing of it."""
    await add(cluster, "d0")
    await add(cluster, "d1")
    cluster.workers[0].error = Draining("d0 is draining")
    for _ in range(6):
        assert (await cluster.complete("hello", max_tokens=2)).status_code == 200
    cluster.workers[1].error = NoCapacity("full")
    codes = {(await cluster.complete("hello", max_tokens=2)).json()["error"]["code"] for _ in range(4)}
    assert codes <= {"no_capacity", "draining"}


async def test_reflection_and_health(cluster):
    async with open_channel(cluster.router.grpc_address, 5.0) as channel:
        await check_reflection_and_health(channel, {"twinflow.rpc.v1.Admin", "twinflow.rpc.v1.Registry"})
