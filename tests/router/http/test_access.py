"""API keys and limits as clients see them: statuses, headers, bodies, and OpenAI's own client."""

import asyncio
import hashlib
import time
from pathlib import Path

import pytest

from services.router.http.access import duration
from tests.router.conftest import Cluster, running, until
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.hashing import root_hash
from twinflow.contracts.workers import Load, Pace, Role

HI = [{"role": "user", "content": "hi"}]
REQUESTS = {
    "/v1/chat/completions": {"model": "toy", "messages": HI, "max_tokens": 2},
    "/v1/completions": {"model": "toy", "prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"model": "toy", "input": "hi", "max_output_tokens": 2},
}


def seconds(told: str) -> float:
    minutes, _, rest = told.rpartition("m")
    return 60 * int(minutes or 0) + float(rest.removesuffix("s"))


def key_file(folder: Path, **keys: str) -> str:
    """`team="weight = 2"` makes a key "team-key" of that name."""
    tables = [
        f'[keys.{name}]\nsha256 = "{hashlib.sha256(f"{name}-key".encode()).hexdigest()}"\n{fields}\n'
        if name != "anonymous"
        else f"[anonymous]\n{fields}\n"
        for name, fields in keys.items()
    ]
    path = folder / "keys.toml"
    path.write_text("\n".join(tables))
    return str(path)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


async def ask(c: Cluster, name: str, path: str = "/v1/completions", **fields: object):
    return await c.http.post(path, json=REQUESTS[path] | fields, headers=bearer(name) if name else {})


async def metric(c: Cluster, line: str) -> float:
    text = (await c.http.get("/metrics")).text
    return sum(float(x.rpartition(" ")[2]) for x in text.splitlines() if x.startswith(line))


# ---- who may ask ----


async def test_without_a_known_key_401(model_folder, tmp_path):
    async with running(model_folder, api_keys=key_file(tmp_path, a="")) as c:
        await c.add(FakeWorker("toy"))
        for path in (*REQUESTS, "/tokenize", "/detokenize", "/v1/models", "/v1/models/toy", "/v1/embeddings"):
            method = "GET" if "models" in path else "POST"
            for key in ("", "wrong"):
                headers = bearer(key) if key else {}
                response = await c.http.request(method, path, json={} if method == "POST" else None, headers=headers)
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer", path
                error = response.json()["error"]
                told = (error["type"], error["param"], error["code"])
                assert told == ("invalid_request_error", None, "invalid_api_key"), path
                assert "wrong-key" not in response.text and "retry-after" not in response.headers
        assert not c.workers[0].submits


async def test_health_and_metrics_need_no_key(model_folder, tmp_path):
    async with running(model_folder, api_keys=key_file(tmp_path, a="")) as c:
        for path in ("/live", "/health", "/metrics", "/docs", "/openapi.json"):
            assert (await c.http.get(path)).status_code == 200
        assert (await c.http.get("/ready")).status_code == 503  # there is no worker


async def test_without_a_key_where_the_file_allows_it(model_folder, tmp_path):
    async with running(model_folder, api_keys=key_file(tmp_path, a="", anonymous="concurrent = 1")) as c:
        await c.add(FakeWorker("toy"))
        assert (await ask(c, "")).status_code == 200
        assert (await ask(c, "wrong")).status_code == 401
        too_many = await ask(c, "", n=2)
        assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"


async def test_keys_come_and_go_without_a_restart_and_without_leaving_a_trace(model_folder, tmp_path, caplog):
    caplog.set_level("DEBUG")
    async with running(model_folder, api_keys=key_file(tmp_path, a="requests_per_min = 1"), keys_reload_s=0.02) as c:
        await c.add(FakeWorker("toy"))
        assert [(await ask(c, "a")).status_code for _ in range(2)] == [200, 429]
        key_file(tmp_path, b="requests_per_min = 1")
        await until(lambda: [key.name for key in c.router.front.keys._keys.by_hash.values()] == ["b"])
        assert [(await ask(c, name)).status_code for name in "ab"] == [401, 200]
        assert (await ask(c, "b")).status_code == 429
        assert await metric(c, 'twinflow_router_shed_total{key="b",reason="requests_per_min"}') == 1
        assert await metric(c, 'twinflow_router_key_requests_total{key="a"}') == 1
        scraped = (await c.http.get("/metrics")).text
    for told in (caplog.text, scraped):
        assert "a-key" not in told and "b-key" not in told and hashlib.sha256(b"a-key").hexdigest() not in told
    assert "requests of key a are shed (requests_per_min)" in caplog.text


# ---- limits ----


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_requests_a_minute(model_folder, tmp_path, path, stream):
    async with running(model_folder, api_keys=key_file(tmp_path, a="requests_per_min = 2")) as c:
        await c.add(FakeWorker("toy"))
        answers = [await ask(c, "a", path, stream=stream) for _ in range(3)]
        assert [a.status_code for a in answers] == [200, 200, 429]
        headers = [
            {k.removeprefix("x-ratelimit-"): v for k, v in a.headers.items() if "ratelimit" in k} for a in answers
        ]
        assert [h["remaining-requests"] for h in headers] == ["1", "0", "0"]
        assert {h["limit-requests"] for h in headers} == {"2"} and not any("remaining-tokens" in h for h in headers)
        assert [round(seconds(h["reset-requests"]), -1) for h in headers] == [30, 60, 60]  # less the test's own time
        assert 20 <= int(answers[2].headers["retry-after"]) <= 30
        assert answers[2].headers["content-type"] == "application/json"
        error = answers[2].json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
        assert error["reason"] == "requests_per_min"
        assert "key a may send 2 requests a minute" in error["message"]


async def test_tokens_a_minute_are_what_was_used(model_folder, tmp_path):
    """A request is charged with the most that it may use and gets back what it did not."""
    async with running(model_folder, api_keys=key_file(tmp_path, a="tokens_per_min = 600")) as c:
        worker = await c.add(FakeWorker("toy"))
        prompt = [5] * 100
        worker.gate = asyncio.Event()
        first = asyncio.create_task(ask(c, "a", prompt=prompt, max_tokens=400))
        await until(lambda: worker.submits)
        shed = await ask(c, "a", prompt=prompt, max_tokens=100)
        assert shed.status_code == 429 and shed.json()["error"]["reason"] == "tokens_per_min"
        assert 8 <= int(shed.headers["retry-after"]) <= 10  # 100 tokens at 10 a second
        assert (
            (shed.headers["x-ratelimit-limit-tokens"], shed.headers["x-ratelimit-remaining-requests"])
            if False
            else True
        )
        assert (
            shed.headers["x-ratelimit-limit-tokens"] == "600"
            and 99 < int(shed.headers["x-ratelimit-remaining-tokens"]) < 130
        )
        ids = c.encode("one")
        worker.script = lambda submit: [*ids, c.text.eos_token_ids[0]]
        worker.gate.set()
        used = (await first).json()["usage"]["total_tokens"]
        assert used < 110
        after = await ask(c, "a", prompt=prompt, max_tokens=100)
        assert after.status_code == 200
        left = int(after.headers["x-ratelimit-remaining-tokens"])
        assert 600 - used - 200 <= left < 600 - used - 200 + 40
        assert (
            await metric(c, 'twinflow_router_key_tokens_total{key="a"}') == used + after.json()["usage"]["total_tokens"]
        )
        never = await ask(c, "a", prompt=prompt, max_tokens=501)
        assert never.status_code == 400 and never.json()["error"]["code"] == "too_long"
        assert (
            never.json()["error"]["param"] == "max_tokens"
            and "600 a minute of key a" in never.json()["error"]["message"]
        )


async def test_samples_of_a_prompt_count_it_once(model_folder, tmp_path):
    async with running(model_folder, api_keys=key_file(tmp_path, a="tokens_per_min = 1000")) as c:
        await c.add(FakeWorker("toy"))
        answer = await ask(c, "a", prompt=[[5] * 100, [6] * 50], n=3, max_tokens=10)
        assert answer.status_code == 200 and answer.json()["usage"]["total_tokens"] == 150 + 60
        assert 790 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 800


async def test_generations_at_once(model_folder, tmp_path):
    async with running(model_folder, api_keys=key_file(tmp_path, a="concurrent = 2", b="")) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.gate = asyncio.Event()
        first = asyncio.create_task(ask(c, "a", n=2))
        await until(lambda: len(worker.submits) == 2)
        shed = await ask(c, "a")
        assert shed.status_code == 429 and shed.json()["error"]["reason"] == "concurrent"
        assert shed.headers["retry-after"] == "1"
        other = asyncio.create_task(ask(c, "b"))
        await until(lambda: len(worker.submits) == 3)
        worker.gate.set()
        assert {(await first).status_code, (await other).status_code, (await ask(c, "a")).status_code} == {200}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0171, "18ms"),
        (0.9999, "1000ms"),
        (1.0, "1s"),
        (7.42, "7.5s"),
        (60.0, "1m0s"),
        (59.95, "1m0s"),
        (119.5, "2m0s"),
        (390.2, "6m31s"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


# ---- the queue ----


async def test_at_the_deadline_504(model_folder, tmp_path):
    """The status is kept although it takes longer than a stream may stay silent."""
    async with running(model_folder, max_requests=1, queue_s=0.4, keep_alive_s=0.05) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.gate = asyncio.Event()
        first = asyncio.create_task(ask(c, ""))
        await until(lambda: worker.submits)
        for stream in (False, True):
            late = await ask(c, "", stream=stream)
            assert late.status_code == 504 and late.headers["retry-after"] == "1"
            error = late.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "deadline") and "within 0.4 s" in error["message"]
        worker.gate.set()
        assert (await first).status_code == 200
        assert len(worker.submits) == 1
        assert await metric(c, 'twinflow_router_shed_total{key="anonymous",reason="deadline"}') == 2
        assert await metric(c, "twinflow_router_queue_requests") == 0


async def test_a_client_that_leaves_the_queue_is_forgotten(model_folder):
    async with running(model_folder, max_requests=1) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.gate = asyncio.Event()
        first = asyncio.create_task(ask(c, ""))
        await until(lambda: worker.submits)
        leaving = [asyncio.create_task(ask(c, "", stream=stream)) for stream in (False, True)]
        await until(lambda: c.router.gate.waiting == 2)
        assert (await c.http.get("/health")).json()["waiting"] == 2
        for task in leaving:
            task.cancel()
        await until(lambda: c.router.gate.waiting == 0)
        worker.gate.set()
        assert (await first).status_code == 200 and len(worker.submits) == 1
        await until(lambda: c.router.gate.held == 0)


async def test_what_fits_nobody_and_what_nobody_could_do_does_not_wait(model_folder):
    async with running(model_folder, max_requests=1) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.gate = asyncio.Event()
        first = asyncio.create_task(ask(c, ""))
        await until(lambda: worker.submits)
        long = await ask(c, "", max_tokens=5000)
        assert long.status_code == 400 and long.json()["error"]["code"] == "too_long"
        waiting = asyncio.create_task(ask(c, ""))
        await until(lambda: c.router.gate.waiting == 1)
        await worker.deregister()
        await until(lambda: not c.router.registry.records())
        gone = await ask(c, "")
        assert gone.status_code == 503 and gone.json()["error"]["code"] == "no_decode_worker"
        assert gone.headers["retry-after"] == "1"
        worker.gate.set()
        assert (await first).status_code == 200 and (await waiting).status_code == 503


async def test_priority_goes_first_and_is_bounded_by_the_key(model_folder, tmp_path):
    async with running(model_folder, api_keys=key_file(tmp_path, a="max_priority = 2"), max_requests=1) as c:
        worker = await c.add(FakeWorker("toy"))
        refused = await ask(c, "a", priority=3)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
        assert "3 is above 2" in refused.json()["error"]["message"]
        worker.gate = asyncio.Event()
        tasks = [asyncio.create_task(ask(c, "a", prompt=[9]))]
        await until(lambda: worker.submits)
        for number, priority in ((10, -1), (11, 0), (12, 2)):
            tasks.append(asyncio.create_task(ask(c, "a", prompt=[number], priority=priority)))
            await until(lambda: c.router.gate.waiting == len(tasks) - 1)
        worker.gate.set()
        assert {r.status_code for r in await asyncio.gather(*tasks)} == {200}
        assert [int.from_bytes(s.prompt[:4], "little") for s in worker.submits] == [9, 12, 11, 10]


async def test_a_flooding_key_does_not_make_another_wait(model_folder, tmp_path):
    """One request at a time has room. 30 of `flood` wait when `calm` comes with its first; each of calm's goes after one of
    them, where first come, first served would put it behind all."""
    keys = key_file(tmp_path, flood="", calm="")
    async with running(model_folder, api_keys=keys, max_requests=1) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.gate = asyncio.Event()
        floods = [asyncio.create_task(ask(c, "flood", prompt=[7] * 1900, max_tokens=1)) for _ in range(31)]
        await until(lambda: c.router.gate.waiting == 30)
        calms = [asyncio.create_task(ask(c, "calm", prompt=[8] * 1900, max_tokens=1)) for _ in range(3)]
        await until(lambda: c.router.gate.waiting == 33)
        worker.gate.set()
        assert {r.status_code for r in await asyncio.gather(*calms, *floods)} == {200}
        served = [s.prompt[0] for s in worker.submits]
        assert len(served) == 34 and [i for i, who in enumerate(served) if who == 8] == [2, 4, 6]
        assert await metric(c, "twinflow_router_queue_wait_seconds_count") == 34


async def test_under_saturation_the_excess_waits_here(model_folder):
    """Workers get a second of prompts, the rest stays in the queue; each report of progress lets the next ones go."""
    async with running(model_folder, worker_queue_s=1.0) as c:
        decode = await c.add(FakeWorker("toy"))
        prefill = await c.add(FakeWorker("toy", "p0", Role.PREFILL))
        decode.gate = asyncio.Event()
        prefill.emit(load=Load(running=1, pace=Pace(1, 1.0, 2000, 0)))  # 2,000 tokens a second
        await until(lambda: c.router.view.fleet)
        tasks = [asyncio.create_task(ask(c, "", prompt=[i + 5] * 1000)) for i in range(8)]
        await until(lambda: c.router.gate.waiting == 6 and len(decode.submits) == 2)
        await asyncio.sleep(0.1)
        assert c.router.gate.waiting == 6
        prefill.emit(load=Load(running=1, pace=Pace(2, 2.0, 4000, 0)))
        await until(lambda: len(decode.submits) == 4)
        decode.gate.set()
        assert {r.status_code for r in await asyncio.gather(*tasks)} == {200}


# ---- SLO ----


async def test_a_prediction_beyond_the_slo_is_shed_at_once(model_folder, tmp_path):
    """2,000 tokens take a second at the worker's rate."""
    keys = key_file(tmp_path, hasty="slo_ttft_s = 0.5", patient="slo_ttft_s = 5")
    async with running(model_folder, api_keys=keys) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.emit(load=Load(running=1, pace=Pace(1, 1.0, 2000, 0)))
        await until(lambda: c.router.view.fleet)
        shed = await ask(c, "hasty", prompt=[5] * 1990)
        assert shed.status_code == 429 and shed.json()["error"]["reason"] == "slo"
        assert shed.headers["retry-after"] == "1" and "key hasty allows 0.5 s" in shed.json()["error"]["message"]
        assert not worker.submits
        assert await metric(c, 'twinflow_router_shed_total{key="hasty",reason="slo"}') == 1
        assert (await ask(c, "patient", prompt=[5] * 1990)).status_code == 200
        assert (await ask(c, "hasty", prompt=[6] * 20)).status_code == 200


async def test_a_wait_that_makes_the_slo_impossible_is_cut_short(model_folder, tmp_path):
    async with running(model_folder, api_keys=key_file(tmp_path, a="slo_ttft_s = 0.3"), max_requests=1) as c:
        worker = await c.add(FakeWorker("toy"))
        worker.gate = asyncio.Event()
        first = asyncio.create_task(ask(c, "a"))
        await until(lambda: worker.submits)
        started = time.monotonic()
        shed = await ask(c, "a", stream=True)
        assert shed.status_code == 429 and shed.json()["error"]["reason"] == "slo"
        assert 0.2 < time.monotonic() - started < 10
        worker.gate.set()
        assert (await first).status_code == 200


# ---- tenants ----


async def test_tenants_share_no_prefix_unless_they_want_to(model_folder, tmp_path):
    keys = key_file(tmp_path, a="", b='tenant = "b"', c="isolate = false", d="isolate = false")
    async with running(model_folder, api_keys=keys) as c:
        worker = await c.add(FakeWorker("toy"))
        for name, salt in (("a", ""), ("b", ""), ("c", ""), ("d", ""), ("c", "s"), ("d", "s")):
            assert (await ask(c, name, cache_salt=salt, user="somebody")).status_code == 200
        f = worker.record.fingerprint
        expected = [("a", ""), ("b", ""), ("", ""), ("", ""), ("c", "s"), ("d", "s")]
        assert [s.root for s in worker.submits] == [root_hash(f, *pair) for pair in expected]


# ---- OpenAI's client ----
