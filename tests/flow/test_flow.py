"""A request through all three services, and clients that leave in every phase of it."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from tests.flow.conftest import Flow, run_flow
from tests.models.tiny import prompt
from twinflow.engine.sequence import Phase
from twinflow.transfer.loopback import Manual

Oracle = Callable[[list[int], int], list[int]]
NEW = 8


def body(ids: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": ids, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **more}


async def complete(flow: Flow, ids: list[int], **more: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=flow.url, timeout=30) as http:
        answer = await http.post("/v1/completions", json=body(ids, **more), headers={"x-twinflow-stats": "1"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(flow: Flow, tokens: list[int]) -> str:
    tokenizer = Tokenizer.from_file(f"{flow.router.config.model}/tokenizer.json")
    return tokenizer.decode(tokens, skip_special_tokens=True)


async def test_text_equals_the_oracle_and_stats_tell_the_route(checkpoint: Path, oracle: Oracle) -> None:
    async with run_flow(checkpoint) as flow:
        for n in (1, 64, 65, 200):
            ids = prompt(n, n)
            for round in ("cold", "warm"):
                answer = await complete(flow, ids)
                assert answer["choices"][0]["text"] == text_of(flow, oracle(ids, NEW)), (n, round)
                stats = answer["twinflow"]
                assert (stats["route"], stats["prefill_worker"], stats["decode_worker"]) == ("remote", "p", "d")
                assert stats["slots_moved"] == 1 and stats["transport"] == "loopback"
                assert answer["usage"]["prompt_tokens"] == n
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == (0 if round == "cold" else (n - 1) // 64 * 64)
        await flow.clean()


async def test_a_terminal_first_token_reports_what_was_cached(checkpoint: Path) -> None:
    async with run_flow(checkpoint) as flow:
        await complete(flow, prompt(1, 130))
        answer = await complete(flow, prompt(1, 130), max_tokens=1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
        assert answer["twinflow"]["slots_moved"] == 0
        await flow.clean()


async def test_sync_async_and_streaming_openai_clients(checkpoint: Path) -> None:
    chat: dict[str, Any] = {
        "model": "toy",
        "messages": [{"role": "user", "content": "hello there, how are you? " * 12}],
        "max_tokens": 12,
        "temperature": 0,
    }
    async with run_flow(checkpoint) as flow:
        url = f"{flow.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none") as sync:
            whole = (await asyncio.to_thread(sync.chat.completions.create, **chat)).choices[0].message.content
            models = await asyncio.to_thread(sync.models.list)
            assert [m.id for m in models.data] == ["toy"]
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            again = (await client.chat.completions.create(**chat)).choices[0].message.content
            parts = []
            async for chunk in await client.chat.completions.create(**chat, stream=True):
                parts.append(chunk.choices[0].delta.content or "")
        assert whole and whole == again == "".join(parts)
        await flow.clean()


async def test_concurrent_clients_never_see_each_others_tokens(checkpoint: Path, oracle: Oracle) -> None:
    prompts = [prompt(i, n) for i, n in enumerate((3, 64, 130, 65, 200, 31, 129, 90))]
    async with run_flow(checkpoint) as flow:
        answers = await asyncio.gather(*(complete(flow, ids) for ids in prompts))
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer["choices"][0]["text"] == text_of(flow, oracle(ids, NEW))
        await flow.clean()


async def leave(flow: Flow, ids: list[int], when: Callable[[], bool], stream: bool) -> None:
    """Opens a request, waits for the moment, and drops the connection."""
    async with httpx.AsyncClient(base_url=flow.url, timeout=30) as http:
        request = asyncio.create_task(
            http.post("/v1/completions", json=body(ids, max_tokens=1200, stream=stream)), name="client"
        )
        await flow.until(when, "the moment to leave")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


def in_phase(flow: Flow, worker: str, phase: Phase) -> Callable[[], bool]:
    return lambda: any(s.phase is phase for s in list(flow.engines[worker].sequences.values()))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("phase", ["prefill", "hand-off", "decode"])
async def test_a_client_that_leaves_cleans_up_everywhere(
    checkpoint: Path, oracle: Oracle, phase: str, stream: bool
) -> None:
    reads = Manual()
    async with run_flow(checkpoint, reads, chunk_tokens=16, step_tokens=16) as flow:
        moments = {
            "prefill": in_phase(flow, "p", Phase.RUNNING),
            "hand-off": in_phase(flow, "p", Phase.LEASED),
            "decode": in_phase(flow, "d", Phase.RUNNING),
        }

        def when() -> bool:
            if phase == "decode":
                finish(reads)
            return moments[phase]()

        await leave(flow, prompt(1, 700), when, stream)
        await flow.until(lambda: not flow.engines["d"].sequences, "the decode worker stopped")
        await flow.until(
            lambda: finish(reads) is None and not flow.engines["p"].sequences, "the prefill worker stopped"
        )
        await flow.clean()
        ids = prompt(2, 100)
        answer = asyncio.create_task(complete(flow, ids))
        await flow.until(lambda: finish(reads) is None and answer.done(), "the next request is served")
        assert (await answer)["choices"][0]["text"] == text_of(flow, oracle(ids, NEW))
        await flow.clean()


def finish(reads: Manual) -> None:
    for read in list(reads.reads):
        read.copy()
        read.done()


@pytest.mark.parametrize("sent_first", [False, True], ids=["before the first token", "after it"])
async def test_a_lost_hand_off_changes_no_token(checkpoint: Path, oracle: Oracle, sent_first: bool) -> None:
    """The read fails: the decode worker computes the prompt itself, and sends no token twice."""
    reads = Manual()
    async with run_flow(checkpoint, reads, chunk_tokens=32, step_tokens=32) as flow:
        ids = prompt(1, 300)
        task = asyncio.create_task(complete(flow, ids))
        await flow.until(lambda: bool(reads.reads), "a read is posted")
        if sent_first:
            decoding = flow.engines["d"].sequences
            await flow.until(lambda: any(s.first for s in list(decoding.values())), "the first token is there")
        reads.reads[-1].fail("link down")
        await flow.until(lambda: finish(reads) is None and task.done(), "the request is served")
        answer = await task
        assert answer["choices"][0]["text"] == text_of(flow, oracle(ids, NEW))
        assert answer["twinflow"]["route"] == "local" and "lost hand-offs (p)" in answer["twinflow"]["reason"]
        assert answer["usage"]["completion_tokens"] == NEW
        await flow.clean()
        again = asyncio.create_task(complete(flow, prompt(2, 100)))
        await flow.until(lambda: finish(reads) is None and again.done(), "the next request is served")
        assert (await again)["twinflow"]["route"] == "remote"
        await flow.clean()


async def test_prompt_over_the_limits_names_the_numbers(checkpoint: Path) -> None:
    async with run_flow(checkpoint) as flow, httpx.AsyncClient(base_url=flow.url, timeout=30) as http:
        answer = await http.post("/v1/completions", json=body(prompt(1, 5000)))
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] in ("prompt", "max_tokens")
        assert "5000" in error["message"] and "2048" in error["message"]
        await flow.clean()


async def test_router_sees_what_the_caches_hold(checkpoint: Path) -> None:
    """The second request's predicted hits equal what the decode worker then finds, in whole blocks."""
    async with run_flow(checkpoint) as flow:
        await complete(flow, prompt(1, 200))
        stats = (await complete(flow, prompt(1, 200)))["twinflow"]
        assert stats["predicted"]["decode_attention_tokens"] == 192
        assert stats["decode_attention_tokens"] == 200
        assert json.dumps(stats)  # plain JSON
