"""Every option over HTTP, with real NIXL between processes: the same as from one aggregated worker, logprobs included."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MODEL, Workers
from tests.e2e.oracle import Oracle
from tests.flow.test_api import ASKS, same

STATS = {"x-twinflow-stats": "1"}


async def post(workers: Workers, path: str, **body: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=workers.cluster.base_url, timeout=60, headers=STATS) as http:
        answer = await http.post(f"/v1/{path}", json={"model": Path(MODEL).name, "max_tokens": 24} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def route(answer: dict[str, Any]) -> set[str]:
    return {stats["route"] for stats in answer["twinflow"].get("choices", [answer["twinflow"]])}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ASKS)
async def test_an_option_gives_the_same(workers: Workers, aggregated: Workers, oracle: Oracle, name: str) -> None:
    start = 100 * list(ASKS).index(name)
    ids = oracle.text_ids[start : start + 150]
    want = await post(aggregated, "completions", prompt=ids, **ASKS[name])
    cold, warm = [await post(workers, "completions", prompt=ids, **ASKS[name]) for _ in range(2)]
    assert (route(want), route(cold), route(warm)) == ({"local"}, {"remote"}, {"remote"})
    same(want["choices"], cold["choices"], name)
    same(want["choices"], warm["choices"], name)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_chat_logprobs_are_the_same(workers: Workers, aggregated: Workers) -> None:
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "seed": 3}
    ask |= {"temperature": 0.8, "logprobs": True, "top_logprobs": 3}
    want, got = [await post(w, "chat/completions", **ask) for w in (aggregated, workers)]
    (a,), (b,) = want["choices"], got["choices"]
    assert a["message"] == b["message"] and a["finish_reason"] == b["finish_reason"]
    for ours, theirs in zip(a["logprobs"]["content"], b["logprobs"]["content"], strict=True):
        assert [t["token"] for t in ours["top_logprobs"]] == [t["token"] for t in theirs["top_logprobs"]]
        numbers = [[t["logprob"], *(x["logprob"] for x in t["top_logprobs"])] for t in (ours, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
