"""What the generation endpoints share: the objects they use, and what every answer says besides its text."""

import asyncio
import dataclasses
import os
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from fastapi import Request

from services.router.admission.base import KeyFacts
from services.router.config import RouterConfig
from services.router.entry import Entry
from services.router.generation import Generator, Job, Outcome
from services.router.http.access import header, quota_headers
from services.router.http.events import StreamLimits
from services.router.http.fields import GenerationFields
from services.router.schedule.base import Choice, ChoiceKind
from services.router.text.reply import Piece, TokenText
from services.router.text.tokenizer import ModelText
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.facts import fact
from twinflow.contracts.requests import Grammar, RequestStats

NO_STATS = RequestStats()
STATS_HEADER = b"x-twinflow-stats"  # "1": answers carry a `twinflow` object beside `usage`


@dataclass(frozen=True, slots=True)
class Api:
    config: RouterConfig
    text: ModelText
    generator: Generator
    entry: Entry
    created: int  # unix seconds, of the models list

    @property
    def limits(self) -> StreamLimits:
        return StreamLimits(self.config.keep_alive_s, self.config.slow_client_s)

    def jobs(
        self,
        id: str,
        fields: GenerationFields,
        prompts: Sequence[bytes],
        logprobs: int | None,
        default_tokens: int,
        key: KeyFacts,
        grammar: Grammar | None = None,
    ) -> list[Job]:
        """`n` for each packed prompt, in order of the choices. Samples of one prompt share a seed and differ in their index."""
        count, text = len(prompts) * fields.n, self.text
        if count > self.config.max_prompts:
            raise BadRequest(
                f"n: at most {self.config.max_prompts} choices in one request, asked for {count}", param="n"
            )
        if fields.priority > key.max_priority:
            most = f"{key.max_priority}, the most that key {key.name} may use"
            raise BadRequest(f"priority: {fields.priority} is above {most}", param="priority")
        limit, stops = fields.reply_limit(), fields.stop_strings()
        jobs: list[Job] = []
        for prompt in prompts:
            sampling = fields.sampling(
                limit, random.getrandbits(63), logprobs, text.eos_token_ids, text.vocab_size, text.defaults
            )
            for i in range(fields.n):
                job_id = id if count == 1 else f"{id}-{len(jobs)}"
                one = dataclasses.replace(sampling, sample_index=i, grammar=grammar) if i or grammar else sampling
                jobs.append(
                    Job(
                        job_id,
                        prompt,
                        one,
                        limit,
                        default_tokens,
                        stops,
                        fields.cache_salt,
                        at_once=not fields.stream,
                        key=key,
                        priority=fields.priority,
                    )
                )
        return jobs


@fact(frozen=True, slots=True)
class Finished:
    """A whole reply, for answers that are not streamed."""

    text: str
    tokens: tuple[TokenText, ...]
    finish: str


async def collect(pieces: AsyncGenerator[Piece, None]) -> Finished:
    text: list[str] = []
    tokens: list[TokenText] = []
    finish = ""
    try:
        async for piece in pieces:
            text.append(piece.text)
            tokens += piece.tokens
            finish = piece.finish or finish
    finally:
        await pieces.aclose()
    return Finished("".join(text), tuple(tokens), finish)


async def collect_all(runs: Sequence[AsyncGenerator[Piece, None]]) -> list[Finished]:
    """All at once; the first error cancels the others and is raised as itself."""
    if len(runs) == 1:
        return [await collect(runs[0])]
    tasks = [asyncio.ensure_future(collect(run)) for run in runs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merge(runs: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of several generations as they come, with their index. Each waits until its last piece was taken."""
    if len(runs) == 1:
        async with aclosing(runs[0]) as run:
            async for piece in run:
                yield 0, piece
        return
    waiting = {asyncio.ensure_future(anext(run)): i for i, run in enumerate(runs)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = waiting.pop(task)
                try:
                    piece = task.result()
                except StopAsyncIteration:
                    continue
                yield i, piece
                waiting[asyncio.ensure_future(anext(runs[i]))] = i
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for run in runs:
            await run.aclose()


def usage(outcomes: Sequence[Outcome], n: int = 1) -> dict[str, Any]:
    """A prompt counts once for its `n` samples; cached is what none of them had to compute."""
    prompt = completion = cached = 0
    for i in range(0, len(outcomes), n):
        samples = outcomes[i : i + n]
        prompt += samples[0].prompt_tokens
        completion += sum([o.completion_tokens for o in samples])
        cached += min([o.cached_tokens for o in samples])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def decision_headers(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """How the request is served, as far as it is known when headers are sent; several choices' values are listed once each."""
    ways = tuple([_way(o.choice, o.stats) for o in outcomes if o.choice is not None])
    quotas = quota_headers(outcomes[0].permit.quotas) if outcomes[0].permit is not None else {}
    return quotas | _way_headers(ways)


def _way(choice: Choice, stats: RequestStats | None) -> tuple[str, str, str, str]:
    """Route, reason, decode worker, prefill worker; "" for none."""
    stats = stats or NO_STATS
    remote = choice.candidates[0].record.id if choice.kind is ChoiceKind.REMOTE else ""
    return (
        stats.route or choice.kind.value,
        stats.reason or choice.reason.value,
        choice.decode.id,
        stats.prefill_worker or remote,
    )


@lru_cache(maxsize=1024)
def _way_headers(ways: tuple[tuple[str, str, str, str], ...]) -> dict[str, str]:
    """Not to be changed by who gets them. Routes, reasons and workers are few."""
    told = {}
    for name, values in zip(
        ("route", "reason", "decode-worker", "prefill-worker"), zip(*ways, strict=True), strict=False
    ):
        if any(values):
            quoted = dict.fromkeys(quote(value, safe=" ()/:,;=") for value in values if value)
            told[f"x-twinflow-{name}"] = ",".join(quoted)
    return told


def held(outcomes: Sequence[Outcome]) -> bool:
    """It still waits to be let through to the workers."""
    return outcomes[0].permit is None


def wants_stats(request: Request) -> bool:
    return header(request, STATS_HEADER) == "1"


def stats(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One object for one generation, {"choices": [...]} for several."""
    each = [_stats(o) for o in outcomes]
    return each[0] if len(each) == 1 else {"choices": each}


def _stats(o: Outcome) -> dict[str, Any]:
    told: dict[str, Any] = dataclasses.asdict(o.stats) if o.stats is not None else {}
    if o.choice is not None:
        told["route"] = told.get("route") or o.choice.kind.value
        told["reason"] = told.get("reason") or o.choice.reason.value
        told["predicted"] = {
            "kind": o.choice.kind.value,
            "reason": o.choice.reason.value,
            "decode_worker": o.choice.decode.id,
            "prefill_workers": [c.record.id for c in o.choice.candidates],
            "decode_attention_tokens": o.choice.decode_attention_tokens,
            "decode_usable_tokens": o.choice.decode_usable_tokens,
            "prefill_tokens": o.choice.prefill_tokens,
            "terms": dict(o.choice.terms),
        }
    told["attempts"] = o.attempts
    told["queued_s"] = o.permit.waited_s if o.permit is not None else None
    told["ttft_s"] = o.ttft_s
    told["total_s"] = (o.ended_at or time.monotonic()) - o.started_at
    return told


def new_id(prefix: str) -> str:
    return f"{prefix}-{os.urandom(16).hex()}"
