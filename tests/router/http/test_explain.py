"""Why a request went where it went: only for who has the token."""

import httpx
import pytest

from tests.router.conftest import Cluster, running
from tests.router.fake_worker import FakeWorker
from twinflow.contracts.workers import Role

TOKEN = "s3cret"


async def explain(c: Cluster, token: str = TOKEN, **query: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return await c.http.get("/v1/internal/explain", headers=headers, params=query)


async def test_terms_predictions_and_what_was_found(model_folder):
    async with running(model_folder, admin_token=TOKEN, local_max_tokens=0) as c:
        await c.add(FakeWorker("toy"))
        await c.add(FakeWorker("toy", "p0", Role.PREFILL))
        await c.complete()
        await c.complete()
        newest, older = (await explain(c)).json()["decisions"]
        assert newest["attempt"] != older["attempt"]
        assert (newest["kind"], newest["reason"], newest["decode_worker"]) == ("remote", "long_suffix", "d0")
        assert newest["prefill_workers"] == [{"id": "p0", "usable_tokens": 0}]
        terms = newest["terms_ms"]
        times = "wait prefill behind link transfer hidden second sharing slot step streams"
        assert set(times.split()) < set(terms)
        assert terms["total"] == pytest.approx(sum(terms.values()) - terms["total"], abs=0.01)
        assert newest["predicted"]["prefill_tokens"] == newest["prompt_tokens"] > 0
        assert newest["found"]["cached_tokens"] == 3  # what the worker said
        request_id = older["attempt"].rpartition("-")[0]
        (only,) = (await explain(c, request_id=request_id)).json()["decisions"]
        assert only == older
        assert len((await explain(c, limit=1)).json()["decisions"]) == 1


@pytest.mark.parametrize("token", ["", "wrong", "s3cre"])
async def test_nobody_else(model_folder, token):
    async with running(model_folder, admin_token=TOKEN) as c:
        answer = await explain(c, token)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "unauthorized"


async def test_a_bad_query_is_refused_by_name(model_folder):
    async with running(model_folder, admin_token=TOKEN) as c:
        for limit in (0, 101, "many"):
            answer = await explain(c, limit=limit)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "limit"


async def test_without_a_token_there_is_no_page(cluster):
    assert (await explain(cluster, "")).status_code == 404
