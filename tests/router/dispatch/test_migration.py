"""A reply that has begun goes on at another worker: no token twice, none missing, whatever fails and however."""

import asyncio
import gc
import json
import time
from typing import Any

import pytest

from services.router.dispatch.recovery import Recovery
from tests.router.conftest import Cluster, running, until
from tests.router.fake_worker import FakeWorker, echo
from twinflow.contracts.errors import Internal, NoCapacity
from twinflow.contracts.hashing import unpack_tokens
from twinflow.contracts.workers import Load, Pace, Role

NEW = 12


async def streamed(c: Cluster, **fields: object) -> tuple[str, list[dict[str, Any]]]:
    body = {"model": "toy", "prompt": "one two three", "stream": True, "max_tokens": NEW, **fields}
    answer = await c.http.post("/v1/completions", json=body)
    lines = [json.loads(x) for x in answer.text.replace("data: ", "").split("\n\n") if x.startswith("{")]
    return "".join(x["choices"][0]["text"] for x in lines if x.get("choices")), lines


async def dying(c: Cluster, id: str, after: int, **record: object) -> FakeWorker:
    worker = await c.add(FakeWorker("toy", id, **record))
    worker.die_after, worker.delay_s = after, 0.005
    return worker


def submitted(c: Cluster) -> list[Any]:
    return sorted((s for w in c.workers for s in w.submits), key=lambda s: s.id)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_next_worker_gets_what_was_sent(model_folder, stream):
    async with running(model_folder) as c:
        for i in range(2):
            await dying(c, f"d{i}", after=5)
        await c.add(
            FakeWorker("toy", "d2")
        )  # it never dies; whoever is asked first, it is reached after two moves at most
        if stream:
            text, _ = await streamed(c)
        else:
            answer = (await c.complete(prompt="one two three", max_tokens=NEW)).json()
            text = answer["choices"][0]["text"]
            assert answer["usage"]["completion_tokens"] == NEW
        prompt = c.encode("one two three")
        want = [prompt[i % len(prompt)] for i in range(NEW)]
        assert text == c.text.texts.tokenizer.decode(want)
        attempts = submitted(c)
        assert [len(unpack_tokens(s.forced)) for s in attempts] == [0, 5, 5][: len(attempts)]
        for attempt in attempts:
            assert unpack_tokens(attempt.prompt) == prompt and attempt.sampling.max_tokens == NEW
            assert want[: len(attempt.forced) // 4] == unpack_tokens(attempt.forced)
        assert len({(s.idempotency_id, s.sampling.seed, s.root) for s in attempts}) == 1
        await until(lambda: not c.router.generator.running)
        assert all(w.active_requests == 0 for w in c.router.view.snapshot().workers)


async def test_it_is_counted_and_told(model_folder):
    async with running(model_folder) as c:
        first = await dying(c, "d0", after=3)
        first.gate = asyncio.Event()
        task = asyncio.create_task(
            c.http.post(
                "/v1/completions",
                json={"model": "toy", "prompt": "one two three", "max_tokens": NEW},
                headers={"x-twinflow-stats": "1"},
            )
        )
        await until(lambda: first.submits)
        await c.add(FakeWorker("toy", "d1"))
        first.gate.set()
        told = (await task).json()["twinflow"]
        assert told["attempts"] == 2 and told["predicted"]["decode_worker"] == "d1"
        assert "twinflow_router_migrations_total 1.0" in (await c.http.get("/metrics")).text


async def test_logprobs_cover_every_token_once(model_folder):
    async with running(model_folder) as c:
        await dying(c, "d0", after=5)
        await dying(c, "d1", after=8)
        await c.add(FakeWorker("toy", "d2"))
        answer = (await c.complete(prompt="one two three", max_tokens=NEW, logprobs=1)).json()
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == NEW


@pytest.mark.parametrize("error", [Internal("it broke"), NoCapacity("no memory")], ids=lambda e: e.reason)
async def test_errors_of_a_worker_are_tried_elsewhere_and_faults_are_remembered(model_folder, error):
    """One that breaks is left alone after three times; one that is full is in good health and asked again."""
    async with running(model_folder) as c:
        failing = await c.add(FakeWorker("toy", "d0"))
        failing.error = error
        await c.add(FakeWorker("toy", "d1"))
        for _ in range(24):
            assert (await c.complete(max_tokens=2)).status_code == 200
        assert len(failing.submits) == 3 if isinstance(error, Internal) else len(failing.submits) > 4


async def test_a_lost_session_is_one_fault_whatever_was_inside(model_folder):
    """A worker whose connection broke once, under load, is asked again as soon as it is back."""
    async with running(model_folder) as c:
        first = await dying(c, "d0", after=1)
        first.gate = asyncio.Event()
        inside = [asyncio.create_task(c.complete(max_tokens=2)) for _ in range(8)]
        await until(lambda: len(first.submits) == 8)
        await c.add(FakeWorker("toy", "d1"))
        first.gate.set()
        assert {(await task).status_code for task in inside} == {200}
        assert not c.router.view.breakers.open()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_what_moved_leaves_nothing_to_the_collector(model_folder, stream):
    """One error that all of a lost worker's requests raised held the frames of every one of them."""
    async with running(model_folder) as c:
        first = await dying(c, "d0", after=2)
        first.gate = asyncio.Event()
        inside = [asyncio.create_task(c.complete(max_tokens=4, stream=stream)) for _ in range(8)]
        await until(lambda: len(first.submits) == 8)
        await c.add(FakeWorker("toy", "d1"))
        gc.collect()
        gc.disable()
        try:
            first.gate.set()
            assert {(await task).status_code for task in inside} == {200}
            await until(lambda: not c.router.generator.running)
            kept = [o for o in gc.get_objects() if isinstance(o, Recovery)]
        finally:
            gc.enable()
        assert len(kept) <= 1, "but for the last one of a connection"


@pytest.mark.parametrize("error", [Internal("it broke"), NoCapacity("no memory")], ids=lambda e: e.reason)
async def test_without_another_worker_the_first_error_stays(model_folder, error):
    async with running(model_folder) as c:
        (await c.add(FakeWorker("toy", "d0"))).error = error
        answer = await c.complete()
        assert answer.status_code == (503 if isinstance(error, NoCapacity) else 502)
        assert error.message in answer.json()["error"]["message"]


async def test_one_that_brings_workers_down_stops_after_three(model_folder):
    async with running(model_folder) as c:
        for i in range(4):
            await dying(c, f"d{i}", after=2 + 2 * i)
        text, lines = await streamed(c, max_tokens=100)
        assert "after 3 workers" in lines[-1]["error"]["message"] and lines[-1]["error"]["code"] == "worker_lost"
        assert len(submitted(c)) <= 3 and text


async def test_the_last_worker_lost_says_so(model_folder):
    async with running(model_folder) as c:
        await dying(c, "d0", after=3)
        _, lines = await streamed(c)
        assert "d0 was lost" in lines[-1]["error"]["message"] and "elsewhere" in lines[-1]["error"]["message"]


async def test_a_hanging_engine_is_found_by_its_missing_steps(model_folder):
    """Its front still beats, so the session stays; no token comes, and nobody waits for one."""
    async with running(model_folder, stall_s=0.5, first_token_s=60.0) as c:
        hung = await c.add(FakeWorker("toy", "d0"))
        hung.finish_last = False
        hung.script = lambda submit: c.encode("one two three")[:3]
        task = asyncio.create_task(streamed(c))
        await until(lambda: hung.submits)
        other = await c.add(FakeWorker("toy", "d1"))  # before the first one hangs: from then on somebody must be there
        hung.emit(load=Load(running=1, pace=Pace(steps=10, busy_s=0.1)))
        text, lines = await asyncio.wait_for(task, 10)
        assert "error" not in lines[-1] and other.submits
        prompt = c.encode("one two three")
        assert text == c.text.texts.tokenizer.decode([prompt[i % len(prompt)] for i in range(NEW)])
        assert len(other.submits[0].forced) == 12
        await until(lambda: hung.cancels)


async def hanging_prefill(c: Cluster, decode: FakeWorker) -> str:
    """The prefill worker that the request goes to makes no step any more."""
    await until(lambda: decode.submits)
    first = decode.submits[0].candidates[0].worker_id
    hung = next(w for w in c.workers if w.record.id == first)
    hung.emit(load=Load(running=1, pace=Pace(steps=10, busy_s=0.1)))
    return first


async def test_a_hanging_prefill_worker_is_left_out(model_folder):
    """The decode worker waits for it in good faith: the request is submitted again, without the one that hangs."""
    async with running(model_folder, stall_s=0.5, local_max_tokens=0) as c:
        decode = await c.add(FakeWorker("toy", "d0"))
        decode.gate = asyncio.Event()
        for i in range(2):
            await c.add(FakeWorker("toy", f"p{i}", Role.PREFILL))
        task = asyncio.create_task(c.complete(prompt="one two three", max_tokens=NEW))
        first = await hanging_prefill(c, decode)
        await until(lambda: len(decode.submits) == 2)
        assert [x.worker_id for x in decode.submits[1].candidates] == [{"p0": "p1", "p1": "p0"}[first]]
        decode.gate.set()
        assert (await task).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("tokens", [1, 2])
async def test_a_first_token_does_not_say_that_all_of_the_prompt_was_read(model_folder, tokens: int, stream: bool):
    """It comes with the end of the prompt, and what is left to read may then wait for an engine that hangs. A second one is the
    decode worker's own."""
    async with running(model_folder, stall_s=0.5, local_max_tokens=0) as c:
        decode = await c.add(FakeWorker("toy", "d0"))
        decode.script, decode.finish_last = lambda submit: echo(submit)[:tokens], False
        for i in range(2):
            await c.add(FakeWorker("toy", f"p{i}", Role.PREFILL))
        body = {"model": "toy", "prompt": "one two three", "max_tokens": NEW, "stream": stream}
        task = asyncio.create_task(c.http.post("/v1/completions", json=body))
        await until(lambda: decode.submits)
        await asyncio.sleep(0.3)  # the tokens are here
        first = await hanging_prefill(c, decode)
        if tokens == 1:
            await until(lambda: len(decode.submits) == 2)
            again = decode.submits[1]
            assert first not in [x.worker_id for x in again.candidates] and len(again.forced) == 4
        else:
            await asyncio.sleep(1.5)  # several looks
            assert len(decode.submits) == 1 and not decode.cancels
        task.cancel()


async def test_a_worker_that_steps_on_is_no_hanging_one(model_folder):
    async with running(model_folder, stall_s=0.5) as c:
        worker = await c.add(FakeWorker("toy", "d0"))
        worker.delay_s = 0.1
        task = asyncio.create_task(c.complete(max_tokens=15))
        for step in range(15):
            worker.emit(load=Load(running=1, pace=Pace(steps=step + 1, busy_s=0.1)))
            await asyncio.sleep(0.1)
        assert (await task).status_code == 200


async def test_a_router_that_is_held_up_itself_blames_nobody(model_folder):
    """It hears nobody meanwhile, which says nothing about the engines."""
    async with running(model_folder, stall_s=1.0) as c:
        worker = await c.add(FakeWorker("toy", "d0"))
        worker.gate = asyncio.Event()
        task = asyncio.create_task(c.complete(max_tokens=3))
        await until(lambda: worker.submits)
        worker.emit(load=Load(running=1, pace=Pace(steps=10, busy_s=0.1)))
        await until(lambda: any(w.record.load.running for w in c.router.view.snapshot().workers))
        time.sleep(2.5)  # noqa: ASYNC251
        await asyncio.sleep(0.1)
        worker.gate.set()
        assert (await task).status_code == 200 and not worker.cancels


async def test_two_routers_over_the_same_workers(model_folder):
    """Each has its own view; a request of one never ends or changes what the other asked for, and both see the load."""
    async with running(model_folder) as a, running(model_folder) as b:
        workers = [FakeWorker("toy", f"d{i}") for i in range(2)]
        for worker in workers:
            worker.delay_s = 0.01
            await a.add(worker)
            await b.dial(worker)
        asked = [c.complete([5 + i, 6 + i], max_tokens=20) for i in range(10) for c in (a, b)]
        answers = await asyncio.gather(*asked)
        assert [x.status_code for x in answers] == [200] * 20
        for i in range(0, 20, 2):
            want = a.text.texts.tokenizer.decode([5 + i // 2, 6 + i // 2] * 10)
            assert answers[i].json()["choices"][0]["text"] == want == answers[i + 1].json()["choices"][0]["text"]
        for c in (a, b):
            assert all(w.active_requests == 0 for w in c.router.view.snapshot().workers)
        assert all(worker.sessions == 2 and not worker.cancels for worker in workers)
