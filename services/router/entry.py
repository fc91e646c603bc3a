"""The entry of one HTTP request, with all its choices, through the gate: what it asks for, and what it has used in the end."""

import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.router.admission.base import Ask, Gate
from services.router.generation import Job, Outcome
from services.router.placing.base import Placer
from services.router.view.prompt import PromptKeys


class Entry:
    def __init__(self, gate: Gate, placer: Placer) -> None:
        self._gate = gate
        self._placer = placer

    @asynccontextmanager
    async def admitted(self, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> AsyncIterator[None]:
        """Waits until they may run; they must run inside. Raises Shed, WaitedTooLong, TooLong and BadRequest."""
        permit = await self._gate.enter(await self._ask(jobs, outcomes[0].started_at))
        try:
            for outcome in outcomes:
                outcome.permit = permit
            yield
        finally:
            self._gate.leave(permit.id, used_tokens(jobs, outcomes))

    async def _ask(self, jobs: Sequence[Job], started_at: float) -> Ask:
        """How long its first token would take is only predicted where somebody needs to know."""
        first, longest = jobs[0], max(jobs, key=lambda job: job.prompt_tokens)
        ask = Ask(
            key=first.key,
            prompt_tokens=prompt_tokens(jobs),
            reply_tokens=sum(job.max_tokens or job.default_tokens for job in jobs),
            generations=len(jobs),
            priority=first.priority,
            longest=(longest.prompt_tokens, longest.max_tokens or 1),
        )
        if first.key.slo_ttft_s is None or self._gate.idle:
            return ask
        prompt = PromptKeys(longest.packed, longest.tenant, longest.cache_salt)
        least_s = await self._placer.least_ttft_s(prompt, longest.max_tokens or 1)
        return dataclasses.replace(ask, least_ttft_s=least_s, waited_s=time.monotonic() - started_at)


def prompt_tokens(jobs: Sequence[Job]) -> int:
    """A prompt counts once for all its samples."""
    return sum(job.prompt_tokens for job in jobs if job.sampling.sample_index == 0)


def used_tokens(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> int:
    """Of prompts and replies; none if no worker was given any of it."""
    if all(outcome.choice is None for outcome in outcomes):
        return 0
    return prompt_tokens(jobs) + sum(outcome.completion_tokens for outcome in outcomes)
