"""One generation: choose workers, submit, turn samples into pieces of text, and unwind on every way out.

It is an async generator; closing it (the client left) cancels at the worker at once.
"""

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field

from services.router.admission.base import ANONYMOUS, Gate, KeyFacts, Permit, Quotas, Refusal, Shed, ShedReason
from services.router.config import RouterConfig
from services.router.dispatch.base import SlowClient, WorkerLost
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.recovery import Recovery
from services.router.dispatch.stream import Batch, RequestStream
from services.router.dispatch.submission import submission
from services.router.metrics import Metrics
from services.router.schedule.base import Choice, RouteRequest
from services.router.schedule.choose import choose
from services.router.schedule.explain import Decisions
from services.router.schedule.filters import usable_decoders
from services.router.schedule.limits import reply_tokens
from services.router.schedule.predict import first_token_s
from services.router.text.reply import Piece, Reply
from services.router.text.tokenizer import ModelText
from services.router.view.breakers import is_fault
from services.router.view.prompt import PromptKeys
from services.router.view.view import Key, View
from twinflow.contracts.errors import DeadlineExceeded, NoCapacity, TwinflowError
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.requests import FinishReason, RequestStats, SamplingParams
from twinflow.node.handshake import GRAMMAR

log = logging.getLogger(__name__)


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
    at_once: bool = False  # the client gets the reply whole: nobody looks at a part of it
    pinned: str = ""  # why the reply cannot go on elsewhere once it has begun, if it cannot
    key: KeyFacts = field(default_factory=lambda: KeyFacts(ANONYMOUS))  # of whoever asks
    priority: int = 0

    @property
    def tenant(self) -> str:
        """Of its cached prefixes."""
        return self.key.cache_tenant(self.cache_salt)


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
    max_tokens: int = 0  # of the reply, once a worker was chosen
    sent: list[int] = field(default_factory=list)  # tokens of the reply so far, whatever worker they came from
    too_slow: bool = False  # the client left too much unread
    permit: Permit | None = None  # once it was let through

    @property
    def cached_tokens(self) -> int:
        return self.stats.cached_tokens if self.stats is not None else 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.started_at


class Generator:
    def __init__(
        self, config: RouterConfig, text: ModelText, view: View, dispatcher: Dispatcher, metrics: Metrics, gate: Gate
    ) -> None:
        self._config = config
        self._gate = gate
        self._text = text
        self._view = view
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._policy = config.scheduling
        self.decisions = Decisions()
        self._turn = 0
        self._running = 0

    @property
    def running(self) -> int:
        return self._running

    async def run(self, job: Job, outcome: Outcome) -> AsyncGenerator[Piece, None]:
        """Pieces until one has `finish`. Raises the request's error, also after some pieces."""
        async with self._counted(outcome):
            prompt = PromptKeys(pack_tokens(job.prompt), job.tenant, job.cache_salt)
            recovery = Recovery(job.pinned)
            stop_ids = frozenset(job.sampling.stop_token_ids) | frozenset(self._text.eos_token_ids)
            reply = Reply(self._text, job.stops, stop_ids)
            failure: TwinflowError | None = None
            while True:
                outcome.attempts += 1
                try:
                    choice = outcome.choice = self._choose(job, prompt, outcome, frozenset(recovery.excluded))
                except TwinflowError as e:
                    raise recovery.stranded(failure, e) if failure is not None else e from None
                try:
                    async with aclosing(self._attempt(job, prompt, choice, outcome, reply)) as pieces:
                        async for piece in pieces:
                            yield piece
                    return
                except TwinflowError as e:
                    failure = e
                    recovery.failed(e, choice.decode.key, bool(outcome.sent))
                    self._note_failure(e, choice, outcome)

    def _note_failure(self, error: TwinflowError, choice: Choice, outcome: Outcome) -> None:
        """The request goes on elsewhere."""
        (self._metrics.migrations if outcome.sent else self._metrics.retries).inc()
        blamed = isinstance(error, WorkerLost) and error.culprit is not None
        if is_fault(error) and not blamed:
            self._view.breakers.failed(("", choice.decode.id))
        log.warning(
            "a request leaves worker %s after %d tokens: %s", choice.decode.id, len(outcome.sent), error.message
        )

    @asynccontextmanager
    async def _counted(self, outcome: Outcome) -> AsyncIterator[None]:
        """The account of how it ended."""
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

    def _choose(self, job: Job, prompt: PromptKeys, outcome: Outcome, excluded: frozenset[Key]) -> Choice:
        """Of workers for the prompt and what was sent of the reply. The reply's limit is set by the first choice."""
        self._turn += 1
        sent = len(outcome.sent)
        keys = prompt.extended(pack_tokens(outcome.sent)) if sent else prompt
        snapshot = self._view.snapshot(keys)
        route = RouteRequest(
            model=self._config.model_name,
            prompt_tokens=keys.tokens,
            max_tokens=(job.max_tokens or outcome.max_tokens or 1 + sent) - sent,
            tie_seed=random.getrandbits(64),
            turn=self._turn,
            excluded=excluded,
        )
        if not job.max_tokens and not outcome.max_tokens:
            records = [w.record for w in usable_decoders(snapshot, route, self._policy)]
            max_tokens = reply_tokens(records, keys.tokens, job.default_tokens)
            route = dataclasses.replace(route, max_tokens=max_tokens)
        choice = choose(snapshot, route, self._policy)
        if outcome.attempts == 1:
            self._check_slo(job.key, choice, outcome)  # before anything is charged
        outcome.max_tokens = choice.max_tokens + sent
        self._metrics.chosen(choice)
        self.decisions.add(attempt_id(job, outcome), keys.tokens, choice)
        self._view.charge(attempt_id(job, outcome), choice, keys)
        if outcome.attempts == 1 and outcome.permit is not None:
            self._gate.placed(outcome.permit.id)
        return choice

    def _check_slo(self, key: KeyFacts, choice: Choice, outcome: Outcome) -> None:
        """A first token that would come too late is not worth anybody's time. Raises Shed."""
        predicted_s = first_token_s(choice.terms)
        if key.slo_ttft_s is None or predicted_s is None:
            return
        ttft_s = time.monotonic() - outcome.started_at + predicted_s
        if ttft_s > key.slo_ttft_s:
            told = f"its first token would come after {ttft_s:.2f} s, key {key.name} allows {key.slo_ttft_s:g} s"
            self._metrics.shed_one(key.name, ShedReason.SLO)
            quotas = outcome.permit.quotas if outcome.permit is not None else Quotas()
            raise Shed(Refusal(told, ShedReason.SLO, key.name, ttft_s - key.slo_ttft_s, quotas))

    async def _attempt(
        self, job: Job, prompt: PromptKeys, choice: Choice, outcome: Outcome, reply: Reply
    ) -> AsyncGenerator[Piece, None]:
        id = attempt_id(job, outcome)
        sampling = dataclasses.replace(job.sampling, max_tokens=outcome.max_tokens)
        root = prompt.root(choice.decode.fingerprint)
        stream: RequestStream | None = None
        begun, at_once = False, job.at_once and not job.stops  # a stop string must be seen at once
        try:
            if sampling.grammar is not None and GRAMMAR not in choice.decode.features:
                raise NoCapacity(f"worker {choice.decode.id} is of a release without structured outputs")
            stream = self._dispatcher.submit(
                choice.decode, submission(id, job.id, prompt.packed, root, sampling, choice, outcome.sent)
            )
            while reply.finish is None:
                batch = await (stream.take_rest() if begun and at_once else self._take(stream))
                samples = batch.samples
                if samples and not begun:
                    begun = True
                    self._begun(id, choice, outcome)
                broken = bool(samples) and samples[-1].finish in (FinishReason.ERROR, FinishReason.CANCELLED)
                samples = samples[:-1] if broken else samples
                outcome.sent += [s.token_id for s in samples]
                piece = reply.push(samples)
                outcome.completion_tokens = reply.completion_tokens
                outcome.stats = stream.stats
                if piece.finish is None:
                    if piece.text or piece.tokens:
                        yield piece
                    if broken:
                        raise WorkerLost(f"worker {choice.decode.id} ended the request early")
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
            self.decisions.ended(id, outcome.stats)
            self._view.finished(id)

    def _begun(self, id: str, choice: Choice, outcome: Outcome) -> None:
        """A token came in this attempt."""
        self._view.prefilled(id)
        if outcome.first_token_at is None:
            outcome.first_token_at = time.monotonic()
            self._metrics.ttft.labels(choice.kind.value).observe(outcome.ttft_s or 0.0)

    async def _take(self, stream: RequestStream) -> Batch:
        if stream.begun:
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


def attempt_id(job: Job, outcome: Outcome) -> str:
    return f"{job.id}-{outcome.attempts}"
