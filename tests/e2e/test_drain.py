"""Real processes get SIGTERM, front and engine alike, in the middle of their work: nothing is lost, and they leave with 0."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Workers, start
from tests.e2e.oracle import Oracle
from tests.e2e.test_heart import connect

PROMPT, NEW = 500, 200


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Small chunks, so that a prompt takes a while."""
    extra = [("decode", "local-max-tokens=0"), ("router", "local-max-tokens=0"), ("prefill", "engine.chunk-tokens=8")]
    started = start(tmp_path_factory.mktemp("drain"), prefill=1, decode=1, extra=tuple(extra))
    yield started
    assert started.cluster.stop() == []


def terminate_group(workers: Workers, name: str) -> None:
    process = workers.cluster.process(name)
    process.expected_end = True
    os.killpg(process.pid, signal.SIGTERM)


async def code_of(workers: Workers, name: str, within_s: float = 20.0) -> int:
    async with asyncio.timeout(within_s):
        while (code := workers.cluster.process(name).returncode) is None:
            await asyncio.sleep(0.05)
    return code


@pytest.mark.timeout(240)
async def test_a_pair_leaves_in_the_middle_of_a_request(pair: Workers, oracle: Oracle) -> None:
    prompt = oracle.text_ids[:PROMPT]
    want = (await asyncio.to_thread(oracle.greedy, prompt, NEW)).tokens
    async with connect(pair) as w:
        decode, prefill = w["decode-0"], w["prefill-0"]
        id = decode.submit(prompt, prefill=[prefill], salt="drain", max_tokens=NEW)
        await asyncio.sleep(0.2)
        assert not decode.requests[id].tokens, "still computing"
        terminate_group(pair, "prefill-0")
        await asyncio.wait_for(decode.requests[id].first.wait(), 60)
        terminate_group(pair, "decode-0")
        await asyncio.wait_for(decode.requests[id].over.wait(), 60)
        got = decode.requests[id]
        late = (
            await decode.generate(prompt, salt="late") if pair.cluster.process("decode-0").returncode is None else None
        )
    assert got.error == "" and got.tokens == want
    assert (got.stats.route, got.stats.prefill_worker) == ("remote", "prefill-0")
    assert late is None or late.error, "nothing new is taken"
    assert await code_of(pair, "prefill-0") == 0
    assert await code_of(pair, "decode-0") == 0
