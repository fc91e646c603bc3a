"""One generation: choose workers, submit, turn samples into pieces of text, and unwind on every way out.

It is an async generator; closing it (the client left) cancels at the worker at once.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from services.router.admission.base import ANONYMOUS, KeyFacts, Permit, Quotas, Refusal, Shed, ShedReason
from services.router.config import RouterConfig
from services.router.dispatch.base import Key, SlowClient, WorkerLost
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.recovery import Recovery
from services.router.dispatch.stream import RequestStream
from services.router.dispatch.submission import submission
from services.router.metrics import Metrics
from services.router.placing.base import Ended, Placer, TooLate, Want
from services.router.schedule.base import Choice
from services.router.text.reply import Piece, Reply
from services.router.text.tokenizer import ModelText
from services.router.view.breakers import is_fault
from services.router.view.prompt import PromptKeys
from twinflow.contracts.errors import DeadlineExceeded, NoCapacity, TwinflowError
from twinflow.contracts.facts import fact
from twinflow.contracts.hashing import TOKEN_BYTES, pack_tokens
from twinflow.contracts.requests import FinishReason, RequestStats, SamplingParams
from twinflow.node.handshake import GRAMMAR

log = logging.getLogger(__name__)

SHORT_TOKENS = 1024  # of prompt and reply: to have the next turn find them before events come costs more than it spares


@fact(frozen=True, slots=True)
class Job:
    """`max_tokens` None = the client set none: `default_tokens`, or less where less room is left; it replaces the
    sampling parameters' own."""

    id: str
    packed: bytes  # token ids of the prompt
    sampling: SamplingParams
    max_tokens: int | None
    default_tokens: int
    stops: tuple[str, ...] = ()
    cache_salt: str = ""
    at_once: bool = False  # the client gets the reply whole: nobody looks at a part of it
    key: KeyFacts = field(default_factory=lambda: KeyFacts(ANONYMOUS))  # of whoever asks
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

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


class Shortcut(Protocol):
    """Takes text of a reply in the moment in which its token comes, in the stead of who takes the pieces."""

    def ready(self) -> bool: ...

    def push(self, text: str) -> None:
        """Only while it is ready; the text is not empty."""
        ...


class Generator:
    def __init__(
        self, config: RouterConfig, text: ModelText, placer: Placer, dispatcher: Dispatcher, metrics: Metrics
    ) -> None:
        self._config = config
        self._text = text
        self._placer = placer
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._running = 0

    @property
    def running(self) -> int:
        return self._running

    async def run(self, job: Job, outcome: Outcome, shortcut: Shortcut | None = None) -> AsyncGenerator[Piece, None]:
        """Pieces until one has `finish`. Raises the request's error, also after some pieces. What `shortcut` takes is in no
        piece."""
        self._running += 1
        result = "cancelled"
        try:
            prompt = PromptKeys(job.packed, job.tenant, job.cache_salt)
            recovery = Recovery()
            stop_ids = frozenset((*job.sampling.stop_token_ids, *self._text.eos_token_ids))
            reply = Reply(self._text, job.stops, stop_ids, job.sampling.logprobs is not None)
            failure: TwinflowError | None = None
            while reply.finish is None:
                outcome.attempts += 1
                try:
                    choice = outcome.choice = await self._place(job, prompt, outcome, frozenset(recovery.excluded))
                except TwinflowError as e:
                    raise recovery.stranded(failure, e) if failure is not None else e from None
                attempt = _Attempt(self._placer, self._metrics, job, prompt, choice, outcome, reply)
                try:
                    try:
                        attempt.submit(self._dispatcher, shortcut, self._config.first_token_s)
                        while reply.finish is None:
                            piece = await attempt.take()
                            if attempt.goes_on:  # the client gets its text without waiting for the worker
                                if piece.text or piece.tokens:
                                    yield dataclasses.replace(piece, finish=None)
                                    piece = Piece("", (), piece.finish)
                                await attempt.stop(self._config.stats_wait_s)
                            if piece.text or piece.tokens or piece.finish is not None:
                                yield piece
                        attempt.ok = True
                    except TwinflowError as e:
                        attempt.failed(e)
                        raise
                    finally:
                        attempt.end()
                except TwinflowError as e:
                    failure = e.with_traceback(None)  # else this frame and the error hold each other
                    recovery.failed(e, choice.decode.key)
                    self._note_move(e, choice, outcome)
            result = "ok"
        except TwinflowError as e:
            result = e.reason
            raise
        finally:
            self._running -= 1
            self._count(result, outcome)

    def _note_move(self, error: TwinflowError, choice: Choice, outcome: Outcome) -> None:
        """The request goes on elsewhere."""
        (self._metrics.migrations if outcome.sent else self._metrics.retries).inc()
        log.warning(
            "a request leaves worker %s after %d tokens: %s", choice.decode.id, len(outcome.sent), error.message
        )

    def _count(self, result: str, outcome: Outcome) -> None:
        """The account of how it ended."""
        outcome.ended_at = time.monotonic()
        result = SlowClient.reason if outcome.too_slow else result
        self._metrics.finished(result, outcome.stats, outcome.prompt_tokens, outcome.completion_tokens)
        if result == "ok" and outcome.choice is not None and outcome.stats is not None:
            self._metrics.compare(outcome.choice, outcome.stats)
        if outcome.first_token_at is not None and outcome.completion_tokens > 1:
            rest_s = outcome.ended_at - outcome.first_token_at
            self._metrics.tpot.observe(rest_s / (outcome.completion_tokens - 1))

    async def _place(self, job: Job, prompt: PromptKeys, outcome: Outcome, excluded: frozenset[Key]) -> Choice:
        """Workers for the prompt and what was sent of the reply. The reply's limit is set by the first choice. Raises Shed for
        what would come too late to be worth anybody's time."""
        sent, first = len(outcome.sent), outcome.attempts == 1
        limit, slo_s = job.max_tokens or outcome.max_tokens, job.key.slo_ttft_s
        want = Want(
            id=attempt_id(job, outcome),
            prompt=prompt.extended(pack_tokens(outcome.sent)) if sent else prompt,
            max_tokens=limit - sent if limit else None,
            default_tokens=job.default_tokens,
            excluded=excluded,
            permit_id=outcome.permit.id if first and outcome.permit is not None else None,
            slo_left_s=slo_s - (time.monotonic() - outcome.started_at) if first and slo_s is not None else None,
        )
        choice = await self._placer.place(want)
        if isinstance(choice, TooLate):
            raise self._too_late(job.key, choice.late_s, outcome)
        outcome.max_tokens = choice.max_tokens + sent
        return choice

    def _too_late(self, key: KeyFacts, late_s: float, outcome: Outcome) -> Shed:
        slo_s = key.slo_ttft_s or 0.0
        told = f"its first token would come after {slo_s + late_s:.2f} s, key {key.name} allows {slo_s:g} s"
        self._metrics.shed_one(key.name, ShedReason.SLO)
        quotas = outcome.permit.quotas if outcome.permit is not None else Quotas()
        return Shed(Refusal(told, ShedReason.SLO, key.name, late_s, quotas))


class _Attempt:
    """A generation at one decode worker. `submit`, then `take` until the reply has its end; `end` whatever came of it."""

    def __init__(
        self,
        placer: Placer,
        metrics: Metrics,
        job: Job,
        prompt: PromptKeys,
        choice: Choice,
        outcome: Outcome,
        reply: Reply,
    ) -> None:
        self._placer = placer
        self._metrics = metrics
        self._job = job
        self._prompt = prompt
        self._choice = choice
        self._outcome = outcome
        self._reply = reply
        self._id = attempt_id(job, outcome)
        self._at_once = job.at_once and not job.stops  # a stop string must be seen at once
        self._stream: RequestStream | None = None
        self._late: asyncio.TimerHandle | None = None
        self._gave_up = False  # the worker, with nothing to say why
        self._broke = False  # by its own fault
        self.ok = False  # all of the reply was taken
        self.goes_on = False  # the reply has its end, and its worker does not know

    def submit(self, dispatcher: Dispatcher, shortcut: Shortcut | None, first_token_s: float) -> None:
        """Raises WorkerLost, NoCapacity."""
        job, choice, outcome = self._job, self._choice, self._outcome
        sampling = job.sampling
        if sampling.max_tokens != outcome.max_tokens:
            sampling = dataclasses.replace(sampling, max_tokens=outcome.max_tokens)
        if sampling.grammar is not None and GRAMMAR not in choice.decode.features:
            raise NoCapacity(f"worker {choice.decode.id} is of a release without structured outputs")
        root = self._prompt.root(choice.decode.fingerprint)
        message = submission(self._id, job.id, self._prompt.packed, root, sampling, choice, outcome.sent, self._at_once)
        prefill = choice.candidates[0].record.key if choice.candidates else None
        stream = self._stream = dispatcher.submit(choice.decode, message, prefill)
        stream.on_begun = self._begun
        if shortcut is not None and self._reply.plain:
            stream.shortcut = _shortened(shortcut, outcome, self._reply)
        self._late = asyncio.get_running_loop().call_later(first_token_s, _on_late, stream, first_token_s)

    async def take(self) -> Piece:
        """What there is to show once there is news, perhaps nothing. Raises the request's error."""
        stream, outcome, reply = self._stream, self._outcome, self._reply
        assert stream is not None
        if self._gave_up:
            raise WorkerLost(f"worker {self._choice.decode.id} ended the request early")
        batch = await (stream.take_rest() if self._at_once else stream.take())
        samples = batch.samples
        if samples and samples[-1].finish in (FinishReason.ERROR, FinishReason.CANCELLED):
            self._gave_up, samples = True, samples[:-1]
        outcome.sent += [s.token_id for s in samples]
        piece = reply.push(samples)
        outcome.completion_tokens = reply.completion_tokens
        outcome.stats = stream.stats
        self.goes_on = reply.matched_stop and not batch.last
        return piece

    async def stop(self, wait_s: float) -> None:
        """A cancelled worker still reports what it did; not for long, and never an error."""
        stream = self._stream
        assert stream is not None
        stream.cancel()
        with suppress(TimeoutError, TwinflowError):
            async with asyncio.timeout(wait_s):
                while not (await stream.take()).last:
                    pass
        self._outcome.stats = stream.stats

    def failed(self, error: TwinflowError) -> None:
        self._broke = is_fault(error)
        if isinstance(error, WorkerLost):  # one fault, whatever was inside, and of whom it is
            self._broke, error.loss.counted = error.culprit is None and not error.loss.counted, True

    def end(self) -> None:
        prompt, choice, outcome, reply = self._prompt, self._choice, self._outcome, self._reply
        if self._late is not None:
            self._late.cancel()
        stream, self._stream = self._stream, None  # they hold each other
        if stream is not None:
            outcome.stats, outcome.too_slow = stream.stats, stream.overflowed
            outcome.completion_tokens = reply.completion_tokens
            stream.close()
        held = None
        worth_it = outcome.prompt_tokens + len(outcome.sent) > SHORT_TOKENS and choice.decode.block_tokens
        if self.ok and worth_it and not reply.matched_stop:  # there the worker is told to give it up
            held = prompt.reply_keys(choice.decode, pack_tokens(outcome.sent))
        self._placer.ended(
            Ended(self._id, choice, outcome.stats, self.ok, self._broke, outcome.completion_tokens, held)
        )

    def _begun(self) -> None:
        """A token came in this attempt."""
        outcome = self._outcome
        self._placer.begun(self._id)
        if outcome.first_token_at is None:
            outcome.first_token_at = time.monotonic()
            self._metrics.begun(self._choice.kind.value, outcome.ttft_s or 0.0)


def _on_late(stream: RequestStream, first_token_s: float) -> None:
    if not stream.begun:
        stream.cancel()
        stream.fail(DeadlineExceeded(f"no token within {first_token_s} s"))


def _shortened(shortcut: Shortcut, outcome: Outcome, reply: Reply) -> Callable[[int], bool]:
    """What takes plain tokens for as long as the shortcut is ready. It is called for nearly every token."""
    ready, note, detokenise, push = shortcut.ready, outcome.sent.append, reply.push_plain, shortcut.push

    def take(token_id: int) -> bool:
        if not ready():
            return False
        note(token_id)
        text = detokenise(token_id)
        if text:
            push(text)
        return True

    return take


def attempt_id(job: Job, outcome: Outcome) -> str:
    return f"{job.id}-{outcome.attempts}"
