"""What other routers of prefill/decode clusters are known to get wrong, one test each, seen from a client."""

import asyncio
import json
import logging
import time

import httpx
import pytest

from tests.router.conftest import running, until
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.errors import HandoffFailed, NoCapacity, Overloaded
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash
from twinflow.contracts.workers import Load, Pace, Role

HI = [{"role": "user", "content": "hi"}]
STATS = {"x-twinflow-stats": "1"}


async def predicted(cluster, ids: list[int]) -> dict:
    body = {"model": "toy", "prompt": ids, "max_tokens": 1}
    return (await cluster.http.post("/v1/completions", json=body, headers=STATS)).json()["twinflow"]["predicted"]


async def test_hits_with_a_hole_are_not_contiguous(cluster):
    """Blocks 2 and 3 without block 1, and a checkpoint beyond the attention's reach, are no hit."""
    ids = list(range(50, 70))
    chain = TokenChain(root_hash("f" * 32), 4, pack_tokens(ids))
    later = list(enumerate(chain.block_hashes))[1:3]
    events = [CacheEvent(n + 1, EventKind.BLOCK_STORED, h, 4 * i + 4) for n, (i, h) in enumerate(later)]
    cluster.workers[0].emit(*events, CacheEvent(3, EventKind.CHECKPOINT_STORED, chain.prefix_hash(12), 12))
    await until(lambda: cluster.router.view.index_entries()["d0"] == 3)
    told = await predicted(cluster, ids)
    assert (told["decode_attention_tokens"], told["decode_usable_tokens"]) == (0, 0)


async def test_a_miss_goes_to_the_less_busy_worker_and_ties_are_random(model_folder):
    async with running(model_folder) as c:
        workers = [await c.add(FakeWorker("toy", f"d{i}")) for i in range(2)]
        for i in range(24):
            await c.complete([60 + i, 61, 62], max_tokens=1)
        shares = [len(w.submits) for w in workers]
        assert min(shares) >= 3, f"one at a time, all of them misses: {shares}"
        workers[0].gate = workers[1].gate = asyncio.Event()
        before = [len(w.submits) for w in workers]
        held = [asyncio.create_task(c.complete([90 + i] * 400, max_tokens=4)) for i in range(8)]
        await until(lambda: sum(len(w.submits) for w in workers) == sum(before) + 8)
        assert [len(w.submits) - b for w, b in zip(workers, before, strict=True)] == [4, 4]
        workers[0].gate.set()
        await asyncio.gather(*held)


@pytest.mark.parametrize("error", [NoCapacity("full"), Overloaded("busy")], ids=["503", "429"])
async def test_back_pressure_trips_no_breaker(cluster, error):
    worker = cluster.workers[0]
    worker.error = error
    for _ in range(8):
        assert (await cluster.complete()).status_code == error.http_status
    assert not cluster.router.view.breakers.open()
    worker.error = None
    assert (await cluster.complete()).status_code == 200


async def test_faults_do_trip_it(cluster):
    """The other side of the test before."""
    cluster.workers[0].error = HandoffFailed("broke")
    for _ in range(4):
        await cluster.complete()
    assert cluster.router.view.breakers.open()


async def test_no_request_is_sent_to_a_prefill_worker(model_folder):
    """Its leg is opened by the decode worker, so that nothing of the client's request can be inherited by mistake; what the
    decode worker gets is one submission with everything in it."""
    async with running(model_folder, local_max_tokens=0) as c:
        decode = await c.add(FakeWorker("toy"))
        prefill = await c.add(FakeWorker("toy", "p0", Role.PREFILL))
        response = await c.complete(
            "hello there",
            n=2,
            stop=["STOP"],
            min_tokens=3,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert response.status_code == 200 and '"usage"' in response.text
        assert not prefill.submits and len(decode.submits) == 2
        assert all(s.sampling.min_tokens == 3 and [x.worker_id for x in s.candidates] == ["p0"] for s in decode.submits)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_disconnect_is_noticed_before_the_next_token(cluster, stream):
    worker = cluster.workers[0]
    worker.gate = asyncio.Event()  # there is no next token
    async with httpx.AsyncClient(base_url=cluster.url) as leaving:
        body = {"model": "toy", "messages": HI, "stream": stream, "n": 2}
        request = asyncio.create_task(leaving.post("/v1/chat/completions", json=body, timeout=30))
        await until(lambda: len(worker.submits) == 2)
        left_at = time.monotonic()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await until(lambda: len(worker.cancels) == 2, within_s=2.0)
    assert max(worker.cancels.values()) - left_at < 1.0


async def test_bytes_flow_during_a_long_prefill(model_folder):
    async with running(model_folder, keep_alive_s=0.1) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.gate = asyncio.Event()
        body = {"model": "toy", "messages": HI, "stream": True, "max_tokens": 2}
        async with c.http.stream("POST", "/v1/chat/completions", json=body) as response:
            chunks = response.aiter_text()
            async with asyncio.timeout(5):
                assert [await anext(chunks) for _ in range(3)] == [": keep-alive\n\n"] * 3
            worker.gate.set()
            assert "".join([c async for c in chunks]).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_logprobs_are_asked_for_when_the_prompt_is_computed_elsewhere(model_folder, path):
    async with running(model_folder, local_max_tokens=0) as c:
        decode = await c.add(FakeWorker("toy"))
        await c.add(FakeWorker("toy", "p0", Role.PREFILL))
        c.says(decode, "one two")
        more = {"logprobs": True, "top_logprobs": 2} if path == "chat" else {"logprobs": 2}
        choice = (await (c.chat if path == "chat" else c.complete)(**more)).json()["choices"][0]
        assert decode.submits[0].candidates and decode.submits[0].sampling.logprobs == 2
        assert choice["logprobs"]["content" if path == "chat" else "token_logprobs"]


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_structured_output_is_not_lost_on_the_way(model_folder, path):
    """It is with every attempt, beside what the client has; a worker that would not know it gets no such request."""
    async with running(model_folder) as c:
        workers = [await c.add(FakeWorker("toy", id)) for id in ("d0", "d1")]
        ids = [*c.encode("one two three"), c.text.eos_token_ids[0]]

        def script(submit):
            """Whoever is asked first dies in the middle."""
            if not submit.forced:
                next(w for w in workers if submit in w.submits).die_after = 2
            return ids

        for worker in workers:
            worker.script = script
        response = await getattr(c, path)(response_format={"type": "json_object"}, max_tokens=20)
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"] if path == "chat" else choice["text"]) == "one two three"
        submits = [s for w in workers for s in w.submits]
        assert len(submits) == 2 and any(s.forced for s in submits)
        assert all(s.sampling.grammar.kind == "json_schema" for s in submits)
    async with running(model_folder) as c:
        old = await c.add(FakeWorker("toy", features=()))
        response = await getattr(c, path)(response_format={"type": "json_object"})
        assert response.status_code == 503 and "structured outputs" in response.json()["error"]["message"]
        assert not old.submits and (await getattr(c, path)()).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_errors_before_the_first_token_have_their_status_shape_and_retry_after(model_folder, stream):
    """Never 200 with an error inside."""
    async with running(model_folder) as c:
        nobody = await c.complete(stream=stream)
        worker = await c.add(FakeWorker("toy"))
        told = {503: nobody}
        for error in (Overloaded("busy"), HandoffFailed("broke")):
            worker.error = error
            told[error.http_status] = await c.complete(stream=stream)
    assert set(told) == {429, 502, 503}
    for status, response in told.items():
        assert response.status_code == status and response.headers["content-type"] == "application/json"
        body = response.json()
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
        assert int(response.headers["retry-after"]) >= 1


async def test_waiting_in_line_is_no_death(model_folder):
    """A worker that makes steps for others keeps a request that waits longer than a worker may stand still."""
    async with running(model_folder, stall_s=0.5, first_token_s=30.0) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.gate = asyncio.Event()
        request = asyncio.create_task(c.complete(max_tokens=2))
        await until(lambda: worker.submits)
        for step in range(20):
            worker.emit(load=Load(pace=Pace(steps=step + 1)))
            await asyncio.sleep(0.1)
        assert not request.done() and not worker.cancels
        worker.gate.set()
        assert (await request).status_code == 200


async def test_a_fall_back_is_logged_as_a_warning_and_told(model_folder, caplog):
    async with running(model_folder) as c:
        dying = await c.add(FakeWorker("toy", "d0"))
        dying.error = HandoffFailed("broke")
        await c.add(FakeWorker("toy", "d1"))
        with caplog.at_level(logging.WARNING):
            async with asyncio.timeout(20):
                while not dying.submits:  # ties are random
                    body = {"model": "toy", "prompt": "x", "max_tokens": 2}
                    response = await c.http.post("/v1/completions", json=body, headers=STATS)
        assert response.status_code == 200 and response.json()["twinflow"]["attempts"] == 2
        assert any(r.levelno == logging.WARNING and "leaves worker d0" in r.getMessage() for r in caplog.records)


async def test_a_decode_worker_of_another_model_is_never_picked(model_folder):
    async with running(model_folder, local_max_tokens=0) as c:
        other = await c.add(FakeWorker("other", "d9"))
        assert (await c.complete()).status_code == 503
        await c.add(FakeWorker("toy", "d0"))
        foreign = await c.add(FakeWorker("toy", "p9", Role.PREFILL, fingerprint="e" * 32))
        for i in range(10):
            response = await c.complete([70 + i, 71], max_tokens=1)
            assert response.headers["x-twinflow-decode-worker"] == "d0"
            assert "x-twinflow-prefill-worker" not in response.headers
        assert not other.submits and not foreign.submits


async def test_decode_is_healthy_without_prefill_and_live_without_anybody(model_folder):
    async with running(model_folder) as c:
        assert (await c.http.get("/live")).status_code == 200
        assert (await c.http.get("/ready")).status_code == 503
        await c.add(FakeWorker("toy"))
        assert (await c.http.get("/ready")).status_code == 200
        assert json.loads((await c.complete(max_tokens=1)).text)["choices"]
