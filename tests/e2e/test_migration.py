"""Real decode processes are killed in the middle of an answer: it goes on at another one, with the same tokens."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from services.cli.cluster import get_json
from tests.e2e.conftest import Workers
from tests.e2e.oracle import Oracle

NEW = 400


def busy(workers: Workers) -> str | None:
    """The decode worker that a request runs on."""
    known = get_json(workers.cluster.base_url, "/health")[1]["workers"]
    return next((w["id"] for w in known if w["role"] == "decode" and w["active_requests"]), None)


async def ask(
    workers: Workers,
    prompt: list[int],
    kill_after: int | None,
    kill: Callable[[str], None] | None = None,
    **sampling: Any,
) -> tuple[str, int, str]:
    """Text, tokens, and which worker was killed (or what `kill` does) after so many pieces."""
    kill = kill or workers.cluster.kill
    request = {"prompt": prompt, "max_tokens": NEW, "stream": True, "ignore_eos": True, **sampling}
    text, killed, pieces, usage = "", "", 0, {}
    async with httpx.AsyncClient(base_url=workers.cluster.base_url, timeout=120) as http:
        name = (await http.get("/v1/models")).json()["data"][0]["id"]
        request |= {"model": name, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/completions", json=request) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                told = json.loads(line.removeprefix("data: "))
                assert "error" not in told, told
                usage = told.get("usage") or usage
                text += "".join(choice["text"] for choice in told["choices"])
                pieces += 1
                if kill_after is not None and pieces == kill_after:
                    killed = await asyncio.to_thread(busy, workers) or ""
                    kill(killed)
    return text, usage["completion_tokens"], killed


NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": NEW}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.0, "top_p": 0.95, "seed": 11},
        {"temperature": 1.0, "seed": 3, "response_format": SCHEMA},
    ],
    ids=["greedy", "sampled", "structured"],
)
async def test_a_killed_decode_worker_costs_time_only(
    mortal: Workers, oracle: Oracle, sampling: dict[str, Any]
) -> None:
    prompt = oracle.text_ids[:300]
    want, tokens, _ = await ask(mortal, prompt, None, **sampling)
    assert tokens == NEW
    began = time.monotonic()
    got, tokens, killed = await ask(mortal, prompt, 20, **sampling)
    print(f"\n{killed} killed, answered after {time.monotonic() - began:.1f} s")
    assert killed.startswith("decode-")
    assert (got, tokens) == (want, NEW)
    if "response_format" in sampling:  # it is cut by its length, in a list of numbers
        assert all(0 <= n <= 999 for n in json.loads(want.rstrip(", ") + "]"))
    while killed in connected(mortal):  # until the router has noticed, it would count as ready
        await asyncio.sleep(0.1)
    mortal.cluster.start(killed)
    await asyncio.to_thread(mortal.cluster.wait_ready, 100)


def connected(workers: Workers) -> set[str]:
    return {w["id"] for w in get_json(workers.cluster.base_url, "/health")[1]["workers"] if w["connected"]}
