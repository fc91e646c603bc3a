"""One generation: choose workers, submit, turn samples into pieces of text, and unwind on every way out.

It is an async generator; closing it (the client left) cancels at the worker at once.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field

from services.router.config import RouterConfig
from services.router.dispatch.base import SlowClient, WorkerLost
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.stream import Batch, RequestStream
from services.router.dispatch.submission import submission
from services.router.metrics import Metrics
from services.router.schedule.base import Choice, RouteRequest
from services.router.schedule.choose import choose
from services.router.schedule.filters import usable_decoders
from services.router.schedule.limits import reply_tokens
from services.router.text.reply import Piece, Reply
from services.router.text.tokenizer import ModelText
from services.router.view.prompt import PromptKeys
from services.router.view.view import Key, View
from twinflow.contracts.errors import DeadlineExceeded, Draining, Overloaded, TwinflowError
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.requests import FinishReason, RequestStats, SamplingParams

MAX_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Job:
    """`max_tokens` None = the client set none: `default_tokens`, or less where less room is left; it replaces the
    sampling parameters' own."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None
    default_tokens: int
    stops: tuple[str, ...] = ()
    cache_salt: str = ""


@dataclass(slots=True)
class Outcome:
    """What is known about a generation besides its text; filled in while it runs."""

    prompt_tokens: int
    completion_tokens: int = 0
    stats: RequestStats | None = None
    choice: Choice | None = None
    started_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    ended_at: float | None = None
    attempts: int = 0
    too_slow: bool = False  # the client left too much unread

    @property
    def cached_tokens(self) -> int:
        return self.stats.cached_tokens if self.stats is not None else 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.started_at


class Generator:
    def __init__(
        self, config: RouterConfig, text: ModelText, view: View, dispatcher: Dispatcher, metrics: Metrics
    ) -> None:
        self._config = config
        self._text = text
        self._view = view
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._policy = config.scheduling
        self._turn = 0
        self._running = 0

    @property
    def running(self) -> int:
        return self._running

    async def run(self, job: Job, outcome: Outcome) -> AsyncGenerator[Piece, None]:
        """Pieces until one has `finish`. Raises the request's error, also after some pieces."""
        async with self._counted(outcome):
            keys = PromptKeys(pack_tokens(job.prompt), cache_salt=job.cache_salt)
            excluded: frozenset[Key] = frozenset()
            while True:
                outcome.attempts += 1
                choice = outcome.choice = self._choose(job, keys, excluded)
                try:
                    async with aclosing(self._attempt(job, keys, choice, outcome)) as pieces:
                        async for piece in pieces:
                            yield piece
                    return
                except (WorkerLost, Draining):  # a drain that this router did not know of when it chose
                    if outcome.first_token_at is not None or outcome.attempts >= MAX_ATTEMPTS:
                        raise
                    excluded |= {choice.decode.key}
                    self._metrics.retries.inc()

    @asynccontextmanager
    async def _counted(self, outcome: Outcome) -> AsyncIterator[None]:
        """Admission and the account of how it ended."""
        if self._running >= self._config.max_requests:
            raise Overloaded(f"{self._running} requests are running, the most this router takes; try again later")
        self._running += 1
        self._metrics.in_flight.inc()
        result = "cancelled"
        try:
            yield
            result = "ok"
        except TwinflowError as e:
            result = e.reason
            raise
        finally:
            self._running -= 1
            self._metrics.in_flight.dec()
            outcome.ended_at = time.monotonic()
            result = SlowClient.reason if outcome.too_slow else result
            self._metrics.finished(result, outcome.stats, outcome.prompt_tokens, outcome.completion_tokens)
            if result == "ok" and outcome.choice is not None and outcome.stats is not None:
                self._metrics.compare(outcome.choice, outcome.stats)
                self._view.learn(outcome.choice, outcome.stats, outcome.completion_tokens)
            if outcome.first_token_at is not None and outcome.completion_tokens > 1:
                rest_s = outcome.ended_at - outcome.first_token_at
                self._metrics.tpot.observe(rest_s / (outcome.completion_tokens - 1))

    def _choose(self, job: Job, keys: PromptKeys, excluded: frozenset[Key]) -> Choice:
        self._turn += 1
        snapshot = self._view.snapshot(keys)
        route = RouteRequest(
            model=self._config.model_name,
            prompt_tokens=keys.tokens,
            max_tokens=job.max_tokens or 1,
            tie_seed=random.getrandbits(64),
            turn=self._turn,
            excluded=excluded,
        )
        if job.max_tokens is None:
            records = [w.record for w in usable_decoders(snapshot, route, self._policy)]
            max_tokens = reply_tokens(records, keys.tokens, job.default_tokens)
            route = dataclasses.replace(route, max_tokens=max_tokens)
        choice = choose(snapshot, route, self._policy)
        self._metrics.chosen(choice)
        return choice

    async def _attempt(
        self, job: Job, keys: PromptKeys, choice: Choice, outcome: Outcome
    ) -> AsyncGenerator[Piece, None]:
        id = f"{job.id}-{outcome.attempts}"
        sampling = dataclasses.replace(job.sampling, max_tokens=choice.max_tokens)
        message = submission(id, job.id, keys.packed, keys.root(choice.decode.fingerprint), sampling, choice)
        self._view.charge(id, choice, keys)
        stream: RequestStream | None = None
        try:
            stream = self._dispatcher.submit(choice.decode, message)
            stop_ids = frozenset(job.sampling.stop_token_ids) | frozenset(self._text.eos_token_ids)
            reply = Reply(self._text, job.stops, stop_ids)
            while reply.finish is None:
                batch = await self._take(stream, outcome)
                if batch.samples and outcome.first_token_at is None:
                    outcome.first_token_at = time.monotonic()
                    self._metrics.ttft.labels(choice.kind.value).observe(outcome.ttft_s or 0.0)
                    self._view.prefilled(id)
                piece = reply.push(batch.samples)
                outcome.completion_tokens = reply.completion_tokens
                outcome.stats = stream.stats
                if reply.finish in (FinishReason.ERROR.value, FinishReason.CANCELLED.value):
                    raise WorkerLost(f"worker {choice.decode.id} ended the request early ({reply.finish})")
                if piece.finish is None:
                    if piece.text or piece.tokens:
                        yield piece
                    continue
                if reply.matched_stop and not batch.last:
                    if piece.text or piece.tokens:
                        yield dataclasses.replace(piece, finish=None)
                        piece = Piece("", (), piece.finish)
                    stream.cancel()
                    await self._last_stats(stream, outcome)
                yield piece
        finally:
            if stream is not None:
                outcome.stats, outcome.too_slow = stream.stats, stream.overflowed
                stream.close()
            self._view.finished(id)

    async def _take(self, stream: RequestStream, outcome: Outcome) -> Batch:
        if outcome.first_token_at is not None:
            return await stream.take()
        try:
            async with asyncio.timeout(self._config.first_token_s):
                return await stream.take()
        except TimeoutError:
            raise DeadlineExceeded(f"no token within {self._config.first_token_s} s") from None

    async def _last_stats(self, stream: RequestStream, outcome: Outcome) -> None:
        """A cancelled worker still reports what it did; not for long, and never an error."""
        with suppress(TimeoutError, TwinflowError):
            async with asyncio.timeout(self._config.stats_wait_s):
                while not (await stream.take()).last:
                    pass
        outcome.stats = stream.stats
