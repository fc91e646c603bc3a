"""A steady load of small greedy requests through the router, and what became of each."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.oracle import TIE, Oracle

HUNG_S = 30.0  # without any sign from the router: far beyond detection (3 s), recovery (5 s) and two migrations
THINK_S = (0.05, 0.4)
SHARED = 0.3  # of the requests may hit what others have cached; the rest have a cache of their own


@dataclass(frozen=True, slots=True)
class Question:
    prompt: list[int]
    new_tokens: int
    text: str  # the answer without any fault


@dataclass(slots=True)
class Exchange:
    """One request. Times are `time.monotonic()`; `marks` has one per event of the stream."""

    question: Question
    began: float
    marks: list[float] = field(default_factory=list)
    ended: float | None = None
    text: str = ""
    tokens: int | None = None
    error: str = ""  # code of an error answer, or LOST, or HUNG
    message: str = ""

    @property
    def right(self) -> bool:
        return not self.error and self.text == self.question.text and self.tokens == self.question.new_tokens

    @property
    def contradicts(self) -> bool:
        """What the client got, be it all or the part before an error, differs from the fault-free answer."""
        return not self.right if not self.error else not self.question.text.startswith(self.text)

    @property
    def longest_wait_s(self) -> float:
        signs = [self.began, *self.marks, *([self.ended] if self.ended else [])]
        return max((b - a for a, b in itertools.pairwise(signs)), default=0.0)

    def sign_since(self, at: float) -> bool:
        """Something came later, or its end."""
        return self.ended is not None or (bool(self.marks) and self.marks[-1] > at)

    def silence_after(self, at: float, within_s: float) -> float:
        """Seconds from `at` to the end of the longest wait that began before `at + within_s`; 0 if it was over by then."""
        signs = [self.began, *self.marks, *([self.ended] if self.ended else [])]
        waits = [(b - max(a, at), b - at) for a, b in itertools.pairwise(signs) if b > at and a < at + within_s]
        return max(waits, default=(0.0, 0.0))[1]


LOST = "connection lost"  # the router itself went away, without a word
HUNG = "hung"


def questions(oracle: Oracle, seed: int, count: int, *, prompt_tokens: int, new_tokens: int) -> list[Question]:
    """Prompts up to `prompt_tokens` long whose answers are certain: no near-tie of the oracle anywhere in them."""
    rng = random.Random(seed)
    found: list[Question] = []
    while len(found) < count:
        length = rng.randint(prompt_tokens // 4, prompt_tokens)
        start = rng.randrange(len(oracle.text_ids) - length)
        prompt = oracle.text_ids[start : start + length]
        answer = oracle.greedy(prompt, new_tokens)
        if min(answer.gaps) >= TIE:
            text = oracle.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            found.append(Question(prompt, new_tokens, text))
    return found


class Load:
    """`clients` of them, each asking again once it has its answer. `exchanges` has all requests, in the order of their start."""

    def __init__(self, base_url: str, model: str, seed: int, known: Sequence[Question], clients: int) -> None:
        self._http = httpx.AsyncClient(base_url=base_url, timeout=httpx.Timeout(None, connect=5.0))
        self._model = model
        self._rng = random.Random(seed)
        self._known = known
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self.exchanges: list[Exchange] = []

    @property
    def open(self) -> list[Exchange]:
        return [e for e in self.exchanges[-4 * self._clients :] if e.ended is None]

    def start(self) -> None:
        self._stopping.clear()
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(self._clients)]

    async def drain(self) -> None:
        """No new requests; those that run get their end."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    async def once(self, question: Question, salt: str) -> Exchange:
        exchange = Exchange(question, time.monotonic())
        self.exchanges.append(exchange)
        try:
            await self._ask(exchange, salt)
        except TimeoutError:
            exchange.error = HUNG
        except httpx.TransportError as e:
            exchange.error, exchange.message = LOST, repr(e)
        exchange.ended = time.monotonic()
        return exchange

    async def _client(self, number: int) -> None:
        count = 0
        while not self._stopping.is_set():
            count += 1
            salt = "shared" if self._rng.random() < SHARED else f"{number}.{count}"
            exchange = await self.once(self._rng.choice(self._known), salt)
            pause_s = self._rng.uniform(*THINK_S) + (0.5 if exchange.error else 0.0)
            await asyncio.sleep(pause_s)

    async def _ask(self, exchange: Exchange, salt: str) -> None:
        question = exchange.question
        body = {
            "model": self._model, "prompt": question.prompt, "max_tokens": question.new_tokens, "temperature": 0,
            "repetition_penalty": 1.0, "ignore_eos": True, "cache_salt": salt, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with asyncio.timeout(HUNG_S) as limit, self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                fail(exchange, json.loads(await answer.aread())["error"])
                return
            async for line in answer.aiter_lines():
                if not line:
                    continue
                if line.startswith("data: "):
                    limit.reschedule(asyncio.get_running_loop().time() + HUNG_S)
                    exchange.marks.append(time.monotonic())
                if line == "data: [DONE]":
                    return
                if line.startswith("data: {"):
                    take(exchange, json.loads(line.removeprefix("data: ")))
            exchange.error = exchange.error or LOST


def take(exchange: Exchange, event: dict[str, Any]) -> None:
    if "error" in event:
        fail(exchange, event["error"])
        return
    exchange.text += "".join(choice["text"] for choice in event["choices"])
    if event.get("usage"):
        exchange.tokens = event["usage"]["completion_tokens"]


def fail(exchange: Exchange, error: dict[str, Any]) -> None:
    exchange.error, exchange.message = error["code"] or "no code", error["message"]
