"""The engine of a real worker is stopped while its front lives: answers go on elsewhere, and afterwards it serves again."""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from services.cli.cluster import get_json
from tests.chaos.engines import engine_of
from tests.chaos.quiet import look
from tests.e2e.conftest import Workers
from tests.e2e.oracle import Oracle
from tests.e2e.test_heart import connect
from tests.e2e.test_migration import ask, busy
from tests.e2e.worker_client import WorkerClient
from tests.router.conftest import until

FEW, NEW = 16, 200


class Freezer:
    """Stops engines of a cluster; all go on again in the end."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._stopped: dict[str, int] = {}

    def freeze(self, name: str) -> None:
        pid = self._stopped[name] = engine_of(self._workers.cluster.process(name).pid)
        os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self._stopped.values():
            os.kill(pid, signal.SIGCONT)
        self._stopped.clear()


@pytest.fixture
def freezer(mortal: Workers) -> Iterator[Freezer]:
    made = Freezer(mortal)
    yield made
    made.thaw()


async def serves(workers: Workers, name: str, oracle: Oracle) -> None:
    """A decode worker computes a prompt of its own, right, and nothing is left there of what it had before."""
    prompt = oracle.text_ids[900:960]
    async with connect(workers) as w:
        got = await asyncio.wait_for(w[name].generate(prompt, salt=f"thawed {name}", max_tokens=FEW), 60)
    assert (got.error, got.tokens) == ("", (await asyncio.to_thread(oracle.greedy, prompt, FEW)).tokens)
    await until_clean(workers)


async def until_clean(workers: Workers) -> None:
    deadline = time.monotonic() + 30
    for address in workers.addresses.values():
        while not (left := await asyncio.to_thread(look, address)).clean:
            assert time.monotonic() < deadline, left
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def asking(workers: Workers, prompt: list[int], tokens: int) -> AsyncIterator["asyncio.Task[httpx.Response]"]:
    async with httpx.AsyncClient(base_url=workers.cluster.base_url, timeout=120) as http:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "repetition_penalty": 1.0, "ignore_eos": True}
        body |= {"cache_salt": str(time.time()), "model": (await http.get("/v1/models")).json()["data"][0]["id"]}
        task = asyncio.create_task(http.post("/v1/completions", json=body))
        yield task
        await asyncio.gather(task, return_exceptions=True)


def usable(workers: Workers) -> bool:
    return get_json(workers.cluster.base_url, "/ready")[0] == 200


@pytest.mark.timeout(240)
async def test_an_answer_leaves_a_decode_worker_whose_engine_is_stopped(
    mortal: Workers, oracle: Oracle, freezer: Freezer
) -> None:
    prompt = oracle.text_ids[:100]
    want, tokens, _ = await ask(mortal, prompt, None, temperature=0, max_tokens=NEW)
    assert tokens == NEW
    got, tokens, frozen = await ask(mortal, prompt, 20, freezer.freeze, temperature=0, max_tokens=NEW)
    assert frozen.startswith("decode-")
    assert (got, tokens) == (want, NEW), "it was moved, whole and unchanged, while the engine still stands"
    freezer.thaw()
    await serves(mortal, frozen, oracle)


@pytest.mark.timeout(240)
async def test_with_every_decode_engine_stopped_the_error_says_so(
    mortal: Workers, oracle: Oracle, freezer: Freezer
) -> None:
    async with asking(mortal, oracle.text_ids[:100], 1500) as task:
        while await asyncio.to_thread(busy, mortal) is None:
            await asyncio.sleep(0.01)
        for name in ("decode-0", "decode-1"):
            freezer.freeze(name)
        answer = await asyncio.wait_for(task, 60)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (502, "worker_lost"), error
        # of either: the request may have gone to the other one before that one had been silent for long enough
        assert re.match(r"worker decode-\d has heard nothing from its engine process for", error["message"]), error
        await until(lambda: not usable(mortal), within_s=20)
    freezer.thaw()
    await until(lambda: usable(mortal), within_s=20)
    for name in ("decode-0", "decode-1"):
        await serves(mortal, name, oracle)


@pytest.mark.timeout(240)
async def test_a_prompt_leaves_a_prefill_worker_whose_engine_is_stopped(
    mortal: Workers, oracle: Oracle, freezer: Freezer
) -> None:
    """Over a session that beats: its front says that it stands still."""
    prompt = oracle.text_ids[200:900]
    want = (await asyncio.to_thread(oracle.greedy, prompt, FEW)).tokens
    async with asking(mortal, prompt, FEW) as task:
        at = await freeze_amid(mortal, task, freezer)
        answer = await asyncio.wait_for(task, 60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == oracle.tokenizer.decode(want)
    freezer.thaw()
    await until_clean(mortal)
    await takes_hand_offs(mortal, at, prompt[:100])


@pytest.mark.timeout(240)
async def test_a_decode_worker_needs_nobody_to_tell_it_that_an_engine_stands_still(
    mortal: Workers, oracle: Oracle, freezer: Freezer
) -> None:
    """Its second candidate, of which no router knows, after a first one that is gone; then one that stood still before."""
    prompt = oracle.text_ids[200:900]
    want = (await asyncio.to_thread(oracle.greedy, prompt, FEW)).tokens
    async with connect(mortal) as w:
        gone = WorkerClient("127.0.0.1:1")
        gone.record = dataclasses.replace(w["prefill-0"].record, id="gone", addresses=(gone.address,))
        asked = asyncio.create_task(
            w["decode-0"].generate(prompt, prefill=[gone, w["prefill-0"]], salt=str(time.time()), max_tokens=FEW)
        )
        assert await freeze_amid(mortal, asked, freezer) == "prefill-0"
        left = await asyncio.wait_for(asked, 60)
        refused = await w["decode-0"].generate(prompt, prefill=[w["prefill-0"]], salt=str(time.time()), max_tokens=FEW)
        for got in (left, refused):
            assert (got.error, got.tokens, got.stats.route) == ("", want, "local")
            assert "prefill-0" in got.stats.faulty_prefill_workers
        assert "prefill worker prefill-0 has heard nothing from its engine process for" in refused.stats.reason
    freezer.thaw()
    await takes_hand_offs(mortal, "prefill-0", prompt[:100])


async def freeze_amid(workers: Workers, prompt: "asyncio.Task[Any]", freezer: Freezer) -> str:
    """Stops the engine of the prefill worker that computes this prompt."""
    while (at := await asyncio.to_thread(computing, workers)) is None:
        assert not prompt.done(), prompt.result()
        await asyncio.sleep(0.01)
    freezer.freeze(at)
    return at


async def takes_hand_offs(workers: Workers, name: str, prompt: list[int]) -> None:
    """A prefill worker does again, as soon as its front has heard its engine, and nothing is left of those before."""
    async with connect(workers) as w, asyncio.timeout(20):
        while True:
            salt = f"thawed {time.time()}"
            got = await w["decode-0"].generate(prompt, prefill=[w[name]], salt=salt, max_tokens=FEW)
            assert not got.error
            if got.stats.prefill_worker == name:
                break
            assert "heard nothing from its engine" in got.stats.reason
    await until_clean(workers)


def computing(workers: Workers) -> str | None:
    """The prefill worker with a prompt to compute."""
    known = get_json(workers.cluster.base_url, "/health")[1]["workers"]
    return next((w["id"] for w in known if w["role"] == "prefill" and w["queued_prefill_tokens"]), None)
