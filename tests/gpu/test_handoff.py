"""A prefill and a decode worker share one card, and everything moves between them over NIXL: the tokens of `transformers`."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.e2e.conftest import Workers, start
from tests.e2e.oracle import Answer, Oracle, Ties
from tests.e2e.worker_client import Generation, WorkerClient
from tests.gpu.engine import TINY

pytestmark = pytest.mark.gpu

NEW, AT_ONCE = 16, 8


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(str(TINY))


def cluster(tmp: Path, dtype: str, **settings: object) -> Workers:
    """Workers that hand off whatever they can. Checksums are on: a wrong byte is an error."""
    extra = (("decode", "local-max-tokens=0"), ("router", "local-max-tokens=0"))
    return start(tmp, device="cuda", dtype=dtype, cache_bytes=1 << 30, extra=extra, **settings)


async def generate(
    workers: Workers, runs: list[tuple[str, list[str]]], prompts: list[list[int]]
) -> list[list[Generation]]:
    """Every prompt in each run: the decode worker's name, and those of its prefill candidates."""
    async with contextlib.AsyncExitStack() as stack:
        w = {n: await stack.enter_async_context(WorkerClient(a)) for n, a in workers.addresses.items()}
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(decode: str, prefill: list[str], prompt: list[int]) -> Generation:
            async with limit:
                return await w[decode].generate(prompt, prefill=[w[p] for p in prefill], salt="gpu", max_tokens=NEW)

        return [list(await asyncio.gather(*(one(d, p, prompt) for prompt in prompts))) for d, p in runs]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_tokens_through_the_card(tmp_path: Path, oracle: Oracle, dtype: str) -> None:
    """fp32: equal to the oracle except at its near-ties. bf16: cold and warm runs beside each other, and the rate at which
    they agree with the oracle in fp32."""
    prompts = oracle.prompts(40)
    workers = cluster(tmp_path, dtype, prefill=1, decode=2)
    runs = [("decode-0", ["prefill-0"]), ("decode-1", ["prefill-0"]), ("decode-0", ["prefill-0"]), ("decode-0", [])]
    try:
        made = asyncio.run(generate(workers, runs, prompts))
    finally:
        assert workers.cluster.stop() == []
    for got in made:
        assert not [g.error for g in got if g.error]
    cold, _, warm, _ = made
    assert {g.stats.route for g in cold} == {"remote"}
    assert all("cuda" in g.stats.transport for g in cold), {g.stats.transport for g in cold}
    assert sum(g.stats.blocks_moved for g in warm) < sum(g.stats.blocks_moved for g in cold)
    want = [oracle.greedy(p, NEW) for p in prompts]
    if dtype == "float32":
        ties = Ties()
        for (decode, prefill), got in zip(runs, made, strict=True):
            for i, (g, answer) in enumerate(zip(got, want, strict=True)):
                ties.check(f"{decode} from {prefill}, prompt {i}", g.tokens, answer)
        assert len(ties.found) <= ties.compared * 1e-3
        print(f"\n{ties.compared} tokens equal over {cold[0].stats.transport}, near-ties: {ties.found or 'none'}")
        return
    rates = [agreement(got, want) for got in made]
    print(f"\nbf16 agrees with fp32 transformers in {min(rates):.3f} to {max(rates):.3f} of the prompts' tokens")
    assert min(rates) > 0.8
    assert max(rates) - min(rates) < 0.1  # the way that the bytes took makes no difference of its own


def agreement(got: list[Generation], want: list[Answer]) -> float:
    """Share of tokens before the first difference."""
    same = 0
    for g, answer in zip(got, want, strict=True):
        pairs = zip(g.tokens, answer.tokens, strict=True)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer.tokens))
    return same / sum(len(a.tokens) for a in want)
