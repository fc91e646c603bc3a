"""The entry of one HTTP request, with all its choices, through the gate: what it asks for, and what it has used in the end."""

import dataclasses
import time
from collections.abc import Sequence
from types import TracebackType

from services.router.admission.base import Ask, Gate, Permit
from services.router.generation import Job, Outcome
from services.router.placing.base import Placer
from services.router.view.prompt import PromptKeys


class Entry:
    def __init__(self, gate: Gate, placer: Placer) -> None:
        self._gate = gate
        self._placer = placer

    def admitted(self, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> "_Admitted":
        """Waits until they may run; they must run inside. Raises Shed, WaitedTooLong, TooLong and BadRequest."""
        return _Admitted(self, jobs, outcomes)

    async def enter(self, jobs: Sequence[Job], started_at: float) -> Permit:
        return await self._gate.enter(await self._ask(jobs, started_at))

    def leave(self, permit: Permit, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
        self._gate.leave(permit.id, used_tokens(jobs, outcomes))

    async def _ask(self, jobs: Sequence[Job], started_at: float) -> Ask:
        """How long its first token would take is only predicted where somebody needs to know."""
        first = longest = jobs[0]
        reply_tokens = 0
        for job in jobs:
            reply_tokens += job.max_tokens or job.default_tokens
            if job.prompt_tokens > longest.prompt_tokens:
                longest = job
        lengths = (longest.prompt_tokens, longest.max_tokens or 1)
        ask = Ask(first.key, prompt_tokens(jobs), reply_tokens, len(jobs), first.priority, lengths)
        if first.key.slo_ttft_s is None or self._gate.idle:
            return ask
        prompt = PromptKeys(longest.packed, longest.tenant, longest.cache_salt)
        least_s = await self._placer.least_ttft_s(prompt, longest.max_tokens or 1)
        return dataclasses.replace(ask, least_ttft_s=least_s, waited_s=time.monotonic() - started_at)


class _Admitted:
    """Of `Entry.admitted`. A generator in its place is one more that the loop keeps account of."""

    def __init__(self, entry: Entry, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
        self._entry = entry
        self._jobs = jobs
        self._outcomes = outcomes

    async def __aenter__(self) -> None:
        self._permit = await self._entry.enter(self._jobs, self._outcomes[0].started_at)
        for outcome in self._outcomes:
            outcome.permit = self._permit

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entry.leave(self._permit, self._jobs, self._outcomes)


def prompt_tokens(jobs: Sequence[Job]) -> int:
    """A prompt counts once for all its samples."""
    if len(jobs) == 1:
        return jobs[0].prompt_tokens
    return sum(job.prompt_tokens for job in jobs if job.sampling.sample_index == 0)


def used_tokens(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> int:
    """Of prompts and replies; none if no worker was given any of it."""
    given, replies = False, 0
    for outcome in outcomes:
        given = given or outcome.choice is not None
        replies += outcome.completion_tokens
    return prompt_tokens(jobs) + replies if given else 0
