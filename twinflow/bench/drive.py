"""Drives a real engine with real requests, as a worker's loop does, and takes the time of what it does.

Prompts are random tokens. Those of decode rows are the same in every row of a context length, so that a later row finds
most of them in the cache; those of prefill rows are new each time.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twinflow.bench.rows import Row
from twinflow.contracts.errors import Internal, from_reason
from twinflow.contracts.hashing import pack_tokens, root_hash
from twinflow.contracts.requests import GenerateRequest, SamplingParams
from twinflow.engine.base import Cancel, Command, Continued, Done, Flush, Generated, Mode, Submit
from twinflow.engine.core import Engine

PREFILL, DECODE = 0, 1  # set apart the prompts of both kinds
SETTLE_STEPS = 8  # between the last prompt's end and the first step that counts
STUCK_TURNS = 1000  # in a row without a token


@dataclass(frozen=True, slots=True)
class Timing:
    """`seconds` of one round of a row, the median one; `context_tokens`: behind each decoding sequence, on average."""

    seconds: float
    rounds: tuple[float, ...]
    context_tokens: float


class Driver:
    """Owns the engine's turns. Raises the error of any request that fails."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self._engine = engine
        self._seed = seed
        self._numbers = itertools.count()
        self._generated: dict[str, int] = {}  # of requests that are not over
        self._root = root_hash(engine.ready.fingerprint, cache_salt="bench")

    def prefill(self, row: Row, rounds: int) -> Timing:
        """The first round compiles and does not count."""
        taken = [self.prompts(row) for _ in range(rounds + 1)][1:]
        return Timing(_median(taken), tuple(taken), row.tokens)

    def prompts(self, row: Row) -> float:
        """Seconds from submitting a row's prompts, new ones, to the last first token."""
        fresh = next(self._numbers)
        requests = [self._request(row.tokens, (PREFILL, fresh, i), max_tokens=1) for i in range(row.batch)]
        began = time.perf_counter()
        self._turn([Submit(r, Mode.LOCAL) for r in requests])
        self._run(lambda: not self._generated)
        taken = time.perf_counter() - began
        self._engine.turn([Flush()])
        return taken

    def decode(self, row: Row, rounds: int, steps: int, then: Callable[[], None] | None = None) -> Timing:
        """Seconds of one step: `rounds` windows of `steps` steps, all sequences in each. `then` is called with the batch
        still running; it may take more steps with `step`."""
        room = self._engine.ready.max_request_tokens - row.tokens
        prompts = [self._request(row.tokens, (DECODE, row.tokens, i), max_tokens=room) for i in range(row.batch)]
        self._turn([Submit(r, Mode.LOCAL) for r in prompts])
        self._run(lambda: min(self._generated.values()) > SETTLE_STEPS)
        before = sum(self._generated.values())
        taken = [self._window(steps, row.batch) for _ in range(rounds)]
        after = sum(self._generated.values())
        if then is not None:
            then()
        self._turn([Cancel(r.id) for r in prompts])
        self._run(lambda: not self._generated)
        return Timing(_median(taken), tuple(taken), row.tokens + (before + after) / 2 / row.batch)

    def step(self, steps: int, batch: int) -> None:
        """As many steps of the running batch as bring `steps` tokens to each."""
        goal = sum(self._generated.values()) + steps * batch
        self._run(lambda: sum(self._generated.values()) >= goal)

    def _window(self, steps: int, batch: int) -> float:
        began, had = time.perf_counter(), sum(self._generated.values())
        self.step(steps, batch)
        if len(self._generated) != batch:
            raise Internal(f"{batch - len(self._generated)} of {batch} sequences ended while they were timed")
        return (time.perf_counter() - began) / ((sum(self._generated.values()) - had) / batch)

    def _run(self, done: Callable[[], bool]) -> None:
        idle = 0
        while not done():
            idle = 0 if self._turn(()) else idle + 1
            if idle > STUCK_TURNS:
                raise Internal(f"the engine made no progress in {idle} turns; {len(self._generated)} requests are open")

    def _turn(self, commands: Sequence[Command]) -> bool:
        """True when some request got a token, ended or was taken in."""
        for command in commands:
            if isinstance(command, Submit):
                self._generated[command.request.id] = 0
        report = self._engine.turn(commands)
        moved = bool(commands)
        for notice in report.notices if report else ():
            if isinstance(notice, Continued):
                for id in self._generated.keys() & notice.ids:
                    self._generated[id] += 1
                moved = True
            elif isinstance(notice, Generated) and notice.id in self._generated:
                self._generated[notice.id] += len(notice.samples)
                moved = True
            elif isinstance(notice, Done):
                if notice.error_reason:
                    raise from_reason(notice.error_reason, f"request {notice.id}: {notice.error_message}")
                self._generated.pop(notice.id, None)
                moved = True
        return moved

    def _request(self, tokens: int, key: tuple[int, ...], max_tokens: int) -> GenerateRequest:
        random = np.random.default_rng([self._seed, *key])
        prompt = random.integers(0, self._engine.ready.vocab_size, tokens).tolist()
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        return GenerateRequest(f"bench-{next(self._numbers)}", pack_tokens(prompt), sampling, self._root)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
