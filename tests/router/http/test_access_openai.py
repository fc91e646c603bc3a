"""Refusals by API key as OpenAI's own client sees them."""

import time

import openai
import pytest

from tests.router.conftest import running
from tests.router.fake_worker import FakeWorker
from tests.router.http.test_access import HI, key_file, metric


async def test_the_openai_client_sees_its_own_errors(model_folder, tmp_path):
    async with running(model_folder, api_keys=key_file(tmp_path, a="requests_per_min = 1")) as c:
        await c.add(FakeWorker("toy"))
        base = {"base_url": f"{c.url}/v1", "max_retries": 0}
        async with openai.AsyncOpenAI(api_key="wrong", **base) as client:
            with pytest.raises(openai.AuthenticationError) as unknown:
                await client.chat.completions.create(model="toy", messages=HI)
        assert (unknown.value.code, unknown.value.type) == ("invalid_api_key", "invalid_request_error")
        async with openai.AsyncOpenAI(api_key="a-key", **base) as client:
            raw = await client.chat.completions.with_raw_response.create(model="toy", messages=HI)
            assert raw.headers["x-ratelimit-remaining-requests"] == "0"
            with pytest.raises(openai.RateLimitError) as shed:
                await client.chat.completions.create(model="toy", messages=HI, stream=True)
        assert (shed.value.code, shed.value.type) == ("rate_limit_exceeded", "rate_limit_error")
        assert shed.value.body["reason"] == "requests_per_min"
        assert 30 <= int(shed.value.response.headers["retry-after"]) <= 60  # less by what has passed since the first


async def test_the_openai_client_comes_back_when_told(model_folder, tmp_path):
    """Its own first pause would be half a second; the bucket needs one and a half."""
    async with running(model_folder, api_keys=key_file(tmp_path, a="requests_per_min = 40")) as c:
        worker = await c.add(FakeWorker("toy"))
        bucket = c.router.gate
        async with openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="a-key", max_retries=1) as client:
            await client.completions.create(model="toy", prompt="x", max_tokens=1)
            state = bucket._keys["a"]
            state._requests.take(39, time.monotonic())
            started = time.monotonic()
            await client.completions.create(model="toy", prompt="x", max_tokens=1)
        assert 1.4 < time.monotonic() - started < 15
        assert len(worker.submits) == 2 and await metric(c, "twinflow_router_http_errors_total") == 1
