"""Real processes die in the middle of a hand-off: the answer goes on, and no token is repeated or changed."""

import asyncio
import time

import pytest

from services.cli.cluster import get_json
from tests.e2e.conftest import Workers
from tests.e2e.oracle import Oracle
from tests.e2e.test_heart import NEW, connect

TOKENS = 700


def connected(workers: Workers) -> set[str]:
    return {w["id"] for w in get_json(workers.cluster.base_url, "/health")[1]["workers"] if w["connected"]}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("left", ["another prefill worker", "none"])
async def test_a_killed_prefill_worker_costs_time_only(mortal: Workers, oracle: Oracle, left: str) -> None:
    offset = 100 if left == "none" else 0
    prompt = oracle.text_ids[offset : offset + TOKENS]
    want = (await asyncio.to_thread(oracle.greedy, prompt, NEW)).tokens
    async with connect(mortal) as w:
        decode, candidates = w["decode-0"], [w["prefill-0"]]
        if left != "none":
            candidates.append(w["prefill-1"])
        id = decode.submit(prompt, prefill=candidates, salt=f"loss {left}", max_tokens=NEW)
        await asyncio.sleep(0.5)  # accepted and computing
        assert not decode.requests[id].tokens
        mortal.cluster.kill("prefill-0")
        killed = time.monotonic()
        await asyncio.wait_for(decode.requests[id].over.wait(), 60)
        got = decode.requests[id]
    print(f"\nover {time.monotonic() - killed:.1f} s after the loss: {got.stats.reason}")
    assert got.error == ""
    assert got.tokens == want
    assert "lost hand-offs (prefill-0)" in got.stats.reason
    assert (got.stats.route, got.stats.prefill_worker) == (("local", "") if left == "none" else ("remote", "prefill-1"))
    while "prefill-0" in connected(mortal):  # until the router has noticed, it would count as ready
        await asyncio.sleep(0.1)
    mortal.cluster.start("prefill-0")  # from the main thread: a child ends with the thread that started it
    await asyncio.to_thread(mortal.cluster.wait_ready, 100)
