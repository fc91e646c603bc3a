"""Invariants 1 and 4 for real: `transformers`, one aggregated worker, and prefill + decode over NIXL give equal tokens,
cold, warm on either side, warm on both, and over a conversation."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import torch

from tests.e2e.conftest import MODEL, Workers, start
from tests.e2e.oracle import Oracle, Ties
from tests.e2e.worker_client import Generation, WorkerClient

NEW = 16
AT_ONCE = 4
BATCH = 40


@contextlib.asynccontextmanager
async def connect(workers: Workers) -> AsyncIterator[dict[str, WorkerClient]]:
    async with contextlib.AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(WorkerClient(address)) for name, address in workers.addresses.items()
        }


async def run_all(
    decode: WorkerClient, prefill: list[WorkerClient], prompts: list[list[int]], salt: str
) -> list[Generation]:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(i: int, prompt: list[int]) -> Generation:
        async with limit:
            return await decode.generate(prompt, prefill=prefill, salt=f"{salt}{i}", max_tokens=NEW)

    return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))


def check(name: str, got: list[Generation], prompts: list[list[int]], oracle: Oracle, ties: Ties) -> None:
    for i, (generation, prompt) in enumerate(zip(got, prompts, strict=True)):
        assert not generation.error, f"{name}, prompt {i}: {generation.error}"
        ties.check(f"{name}, prompt {i} of {len(prompt)} tokens", generation.tokens, oracle.greedy(prompt, NEW))


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)], ids=["40", "200"])
@pytest.mark.timeout(1500)
async def test_equal_tokens_everywhere(workers: Workers, aggregated: Workers, oracle: Oracle, count: int) -> None:
    prompts = oracle.prompts(count)
    ties = Ties()
    async with connect(workers) as w, connect(aggregated) as a:
        for i in range(0, count, BATCH):  # in batches that the caches can hold, so that warm is warm
            await check_batch(w, a["decode-0"], prompts[i : i + BATCH], f"heart{count}-{i}/", oracle, ties)
    print(f"\n{ties.compared} tokens compared, near-ties: {ties.found or 'none'}")
    assert len(ties.found) <= ties.compared * 1e-3


async def check_batch(
    w: dict[str, WorkerClient], alone: WorkerClient, prompts: list[list[int]], salt: str, oracle: Oracle, ties: Ties
) -> None:
    p0, p1, d0, d1 = w["prefill-0"], w["prefill-1"], w["decode-0"], w["decode-1"]
    cold = await run_all(d0, [p0], prompts, salt)
    prefill_warm = await run_all(d1, [p0], prompts, salt)
    decode_warm = await run_all(d0, [p1], prompts, salt)
    both_warm = await run_all(d0, [p0], prompts, salt)
    runs = {
        "prefill + decode, cold": cold,
        "warm on prefill only": prefill_warm,
        "warm on decode only": decode_warm,
        "warm on both": both_warm,
        "aggregated": await run_all(alone, [], prompts, salt),
        "aggregated, warm": await run_all(alone, [], prompts, salt),
    }
    for name, got in runs.items():  # on a thread: the oracle must not stop the heartbeats of the streams
        await asyncio.to_thread(check, name, got, prompts, oracle, ties)
    print(f"\n{len(prompts)} prompts, transport {cold[-1].stats.transport}")
    for i, prompt in enumerate(prompts):
        full, whole = len(prompt) // 64, -(-len(prompt) // 64)
        boundary = (len(prompt) - 1) // 64 * 64
        assert (cold[i].stats.route, cold[i].stats.decode_attention_tokens) == ("remote", 0)
        assert (cold[i].stats.blocks_moved, cold[i].stats.slots_moved) == (whole, 1)
        assert prefill_warm[i].stats.blocks_moved == whole
        assert prefill_warm[i].stats.prefill_resumed_tokens == boundary
        assert decode_warm[i].stats.blocks_moved == both_warm[i].stats.blocks_moved == whole - full
        assert decode_warm[i].stats.prefill_resumed_tokens == 0
        assert both_warm[i].stats.prefill_resumed_tokens == boundary


@pytest.mark.timeout(600)  # the first test to want the workers starts them
async def test_conversation_of_six_turns(workers: Workers, oracle: Oracle) -> None:
    """The first turn is handed off; each later one resumes on the decode worker where the last reply ended, so that it
    computes the new tokens and the reply's last one."""
    ties = Ties()
    async with connect(workers) as w:
        talk = oracle.text_ids[:150]
        end = 0
        for turn in range(6):
            prefill = [w["prefill-0"]] if turn == 0 else []
            got = await w["decode-0"].generate(talk, prefill=prefill, salt="talk", max_tokens=NEW)
            assert not got.error
            want = await asyncio.to_thread(oracle.greedy, talk, NEW)
            ties.check(f"turn {turn}", got.tokens, want)
            assert got.stats.decode_resumed_tokens == end
            assert got.stats.route == ("local" if turn else "remote")
            end = len(talk) + NEW - 1
            talk = talk + want.tokens + oracle.text_ids[500 + 40 * turn : 530 + 40 * turn]
    assert not ties.found, ties.found


@pytest.mark.timeout(600)
async def test_a_template_that_rewrites_the_reply_resumes_at_the_prompts_end(workers: Workers, oracle: Oracle) -> None:
    """E.g. one that drops the reasoning of earlier turns: what follows the prompt is no longer what was said."""
    talk = oracle.text_ids[:150]
    async with connect(workers) as w:
        first = await w["decode-0"].generate(talk, prefill=[w["prefill-0"]], salt="rewritten", max_tokens=NEW)
        rewritten = talk + first.tokens[5:] + oracle.text_ids[700:730]
        got = await w["decode-0"].generate(rewritten, prefill=[], salt="rewritten", max_tokens=NEW)
    assert not first.error and not got.error
    ties = Ties()
    ties.check("rewritten", got.tokens, await asyncio.to_thread(oracle.greedy, rewritten, NEW))
    assert not ties.found, ties.found
    assert (got.stats.route, got.stats.decode_resumed_tokens) == ("local", len(talk))


async def test_attention_hits_survive_an_empty_state_lookup(workers: Workers, oracle: Oracle) -> None:
    """Decode holds attention KV of a shared prefix and no usable checkpoint: only the rest and one slot are moved."""
    first = oracle.text_ids[:330]
    second = first[:250] + oracle.text_ids[1000:1100]
    async with connect(workers) as w:
        decode, prefill = w["decode-0"], [w["prefill-1"]]
        before = await decode.generate(first, prefill=prefill, salt="survive", max_tokens=NEW)
        got = await decode.generate(second, prefill=prefill, salt="survive", max_tokens=NEW)
    assert got.tokens == oracle.greedy(second, NEW).tokens
    assert (got.stats.decode_attention_tokens, got.stats.decode_checkpoints) == (192, ())
    assert (before.stats.blocks_moved, before.stats.slots_moved) == (6, 1)
    assert (got.stats.blocks_moved, got.stats.slots_moved) == (3, 1)
    block = (before.stats.bytes_moved - got.stats.bytes_moved) / 3
    slot = before.stats.bytes_moved - 6 * block
    assert block == 2 * 2 * 64 * 2 * 64 * 4  # layers, K and V, tokens, heads, dim, fp32
    assert slot > 0 and got.stats.bytes_moved == 3 * block + slot


async def test_two_clients_never_see_each_others_tokens(workers: Workers, oracle: Oracle) -> None:
    prompts = oracle.prompts(8)
    async with connect(workers) as one, connect(workers) as two:
        both = await asyncio.gather(
            run_all(one["decode-0"], [one["prefill-0"]], prompts, "a/"),
            run_all(two["decode-0"], [two["prefill-0"]], prompts[::-1], "b/"),
        )
    ties = Ties()
    check("one", both[0], prompts, oracle, ties)
    check("two", both[1], prompts[::-1], oracle, ties)
    assert not ties.found


@pytest.mark.slow
async def test_equal_tokens_over_tcp(tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same hand-off where no memory is shared: READs need both sides' help there."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    extra = (("decode", "local-max-tokens=0"), ("router", "local-max-tokens=0"))
    started = await asyncio.to_thread(start, tmp_path, prefill=1, decode=1, extra=extra)
    try:
        prompts = oracle.prompts(10)
        async with connect(started) as w:
            cold = await run_all(w["decode-0"], [w["prefill-0"]], prompts, "tcp/")
            warm = await run_all(w["decode-0"], [w["prefill-0"]], prompts, "tcp/")
        ties = Ties()
        check("cold", cold, prompts, oracle, ties)
        check("warm", warm, prompts, oracle, ties)
        assert not ties.found
        assert {g.stats.transport for g in cold} == {"ucx/tcp"}
    finally:
        assert await asyncio.to_thread(started.cluster.stop) == []


async def test_the_models_own_sampling_defaults_over_http(workers: Workers, oracle: Oracle) -> None:
    """What its generation config says holds where the client says nothing, as in `transformers`."""
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    ids = oracle.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    with torch.no_grad():
        made = oracle.model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :]
    async with openai.AsyncOpenAI(base_url=f"{workers.cluster.base_url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model=Path(MODEL).name,
            messages=messages,
            max_tokens=40,
            temperature=0,  # type: ignore[arg-type]
        )
    assert answer.choices[0].message.content == oracle.tokenizer.decode(made, skip_special_tokens=True)
