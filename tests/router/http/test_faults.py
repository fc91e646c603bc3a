"""Clients that leave or do not read, workers that die, hang or refuse: nobody waits, nothing ends silently."""

import asyncio
import json
import socket
import time

import httpx
import openai
import pytest

from tests.router.conftest import running, until
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.errors import Incompatible, NoCapacity, TooLong

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("when", ["before-first-token", "mid-stream", "whole"])
async def test_disconnect_cancels_upstream_at_once(cluster, when):
    """Not at the next token: the worker is silent for good when the client leaves."""
    worker = cluster.workers[0]
    worker.finish_last = False
    if when == "mid-stream":
        cluster.says(worker, "hello", eos=False)
    else:
        worker.gate = asyncio.Event()
    async with httpx.AsyncClient(base_url=cluster.url) as leaving:
        body = {"model": "toy", "messages": HI, "stream": when != "whole", "max_tokens": 50}
        request = asyncio.create_task(leaving.post("/v1/chat/completions", json=body, timeout=30))
        await until(lambda: worker.submits)
        await asyncio.sleep(0.2)
        assert not worker.cancels
        left_at = time.monotonic()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await until(lambda: worker.cancels, within_s=2.0)
    assert worker.cancels[worker.submits[0].id] - left_at < 0.5
    await until(lambda: not cluster.router.generator.running)
    (facts,) = cluster.router.view.snapshot().workers
    assert facts.active_requests == 0 and facts.queued_prefill_tokens == 0


async def test_a_slow_client_is_cancelled_and_stalls_nobody(model_folder):
    """It opens a stream and never reads; a second client on the same worker session is served meanwhile."""
    async with running(model_folder, buffer_tokens=200, slow_client_s=1.0) as c:
        worker = await c.add(FakeWorker("toy", max_model_tokens=10**6, max_request_tokens=10**6))
        worker.tokens_per_step = 20
        worker.delay_s = 0.001
        host, port = c.router.http_address.split(":")
        body = {"model": "toy", "prompt": [200], "stream": True, "max_tokens": 100_000, "logprobs": 20}
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((host, int(port)))
            content = json.dumps(body).encode()
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content
            )
            await until(lambda: worker.submits)
            slow = worker.submits[0].id
            served = 0
            async with asyncio.timeout(30):
                while slow not in worker.cancels:
                    assert (await c.complete("one two", max_tokens=4)).status_code == 200
                    served += 1
            assert served
            await until(lambda: not c.router.generator.running)
        assert 'outcome="slow_client"} 1.0' in (await c.http.get("/metrics")).text


@pytest.mark.parametrize("how", ["break", "silence"])
async def test_worker_death_mid_stream_is_an_error_event(model_folder, how):
    async with running(model_folder, silence_s=1.0) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.delay_s = 0.02
        if how == "break":
            worker.die_after = 3
        async with c.http.stream("POST", "/v1/completions", json={"model": "toy", "prompt": "hello there", "stream": True,
                                                                  "max_tokens": 1000}) as response:  # fmt: skip
            assert response.status_code == 200
            lines = []
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    lines.append(json.loads(line.removeprefix("data: ")))
                if how == "silence" and len(lines) == 3:
                    worker.muted = True
        assert len(lines) >= 4 and "choices" in lines[0]
        assert lines[-1]["error"]["code"] == "worker_lost" and "d0" in lines[-1]["error"]["message"]
        await until(lambda: not c.router.generator.running)


async def test_openai_client_raises_on_an_error_in_the_stream(cluster):
    worker = cluster.workers[0]
    worker.delay_s, worker.die_after = 0.02, 2
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(model="toy", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="lost"):
            async for _ in stream:
                pass


async def test_worker_death_in_a_whole_answer_is_no_200(cluster):
    worker = cluster.workers[0]
    worker.delay_s, worker.die_after = 0.01, 3
    response = await cluster.complete(max_tokens=100)
    assert response.status_code == 502 and response.json()["error"]["code"] == "worker_lost"


async def test_unstarted_requests_move_to_another_worker(model_folder):
    async with running(model_folder) as c:
        dying = await c.add(FakeWorker("toy", "d0"))
        dying.die_after = 0
        other = await c.add(FakeWorker("toy", "d1"))
        responses = await asyncio.gather(*(c.complete(max_tokens=4, prompt="one two three") for _ in range(8)))
        assert [r.status_code for r in responses] == [200] * 8
        assert dying.submits and len(other.submits) == 8
        moved = [s for s in other.submits if s.id.endswith("-2")]
        assert {s.idempotency_id for s in moved} >= {s.idempotency_id for s in dying.submits}


async def test_a_request_that_loses_three_workers_fails(model_folder):
    async with running(model_folder) as c:
        for i in range(4):
            (await c.add(FakeWorker("toy", f"d{i}"))).die_after = 0
        response = await c.complete()
        assert response.status_code == 502 and response.json()["error"]["code"] == "worker_lost"
        assert "after 3 workers" in response.json()["error"]["message"]
        assert sum(len(w.submits) for w in c.workers) == 3


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(NoCapacity("pools are full"), 503, "no_capacity"), (TooLong("9 over 8", param="prompt"), 400, "too_long")],
    ids=["full", "long"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_errors_of_the_worker_keep_their_status(cluster, error, status, code, stream):
    cluster.workers[0].error = error
    response = await cluster.complete(stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code and error.message in response.json()["error"]["message"]
    assert ("retry-after" in response.headers) == (status == 503)


async def test_keep_alive_comments_while_nothing_flows(model_folder):
    async with running(model_folder, keep_alive_s=0.1) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.gate = asyncio.Event()
        request = asyncio.create_task(c.complete(stream=True, max_tokens=2))
        await until(lambda: worker.submits)
        await asyncio.sleep(0.5)
        worker.gate.set()
        text = (await request).text
        assert 2 <= text.count(": keep-alive\n\n") <= 6
        assert text.startswith(": keep-alive") and text.endswith("data: [DONE]\n\n")


async def test_no_first_token_is_504_and_cancels(model_folder):
    async with running(model_folder, first_token_s=0.2) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.gate = asyncio.Event()
        response = await c.complete()
        assert (
            response.status_code == 504
            and response.headers["retry-after"]
            and response.json()["error"]["code"] == "deadline"
        )
        await until(lambda: worker.cancels)


async def test_concurrent_clients_never_see_each_others_tokens(cluster):
    """Every reply echoes its own prompt; 40 at once over one session, streamed and whole."""
    cluster.workers[0].delay_s = 0.002
    size = cluster.text.vocab_size
    prompts = [[(7 * i + 13 * k) % (size - 10) + 3 for k in range(12)] for i in range(40)]
    responses = await asyncio.gather(
        *(cluster.complete(p, max_tokens=24, stream=i % 2 == 0) for i, p in enumerate(prompts))
    )
    assert {r.status_code for r in responses} == {200}, [r.text for r in responses if r.status_code != 200][:1]
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if i % 2 == 0:
            data = [x.removeprefix("data: ") for x in response.text.split("\n\n") if x.startswith("data: {")]
            text = "".join(json.loads(x)["choices"][0]["text"] for x in data)
        else:
            text = response.json()["choices"][0]["text"]
        assert text == cluster.text.texts.tokenizer.decode(prompt * 2)
    assert cluster.workers[0].sessions == 1


async def test_a_restarted_worker_is_used_again(model_folder):
    async with running(model_folder) as c:
        first = await c.add(FakeWorker("toy"))
        assert (await c.complete()).status_code == 200
        await first.stop()
        c.workers.remove(first)
        await until(lambda: not c.router.registry.records())
        assert (await c.complete()).status_code == 503
        await c.add(FakeWorker("toy"))
        assert (await c.complete()).status_code == 200


async def test_a_drained_worker_finishes_what_it_has(model_folder):
    async with running(model_folder) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.delay_s = 0.05
        request = asyncio.create_task(c.complete(max_tokens=20))
        await until(lambda: worker.submits)
        await worker.deregister()
        await until(lambda: not c.router.registry.records())
        assert (await c.complete()).json()["error"]["code"] == "no_decode_worker"
        assert (await request).json()["usage"]["completion_tokens"] == 20
        await until(lambda: not c.router.dispatcher.sessions)


async def test_a_worker_that_refuses_the_session_is_not_used(model_folder):
    async with running(model_folder) as c:
        worker = FakeWorker("toy")
        worker.hello_error = Incompatible("protocol 9 to 9 here, 1 to 1 there")
        await worker.start(c.router.grpc_address)
        c.workers.append(worker)
        await until(lambda: c.router.registry.records())
        response = await c.complete()
        assert response.status_code == 503 and "not connected" in response.json()["error"]["message"]


async def test_shutdown_ends_streams_and_cancels(model_folder):
    async with running(model_folder) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.finish_last = False
        request = asyncio.create_task(c.complete(stream=True))
        await until(lambda: worker.submits)
    await asyncio.gather(request, return_exceptions=True)
    assert not c.router.generator.running
