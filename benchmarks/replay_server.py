"""A worker without a model: requests of a trace arrive, hold memory for as long as they would, and use the cache as the
engine does.

    arrival   → in order: `reserve` for the prompt and some growth; who gets none waits, and everybody behind
    prefill   → a chunk ends at each position of the checkpoint plan: `advance`, `commit`, `checkpoint`
    decode    → `extend` to the whole reply; who gets none makes the youngest yield (`release`, donated; back to the head)
    end       → the reply appended and fed but for its last token, `commit`, `release`, donated

Nothing slows anything else down: a request's prefill takes the time of the tokens that it computes, its decode that of the
tokens that it says.
"""

import heapq
import itertools
import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.traces import Request, Service
from twinflow.cache.base import Cache, Holding
from twinflow.contracts.checkpoints import CheckpointKind, checkpoint_positions
from twinflow.contracts.errors import TooLong
from twinflow.contracts.hashing import TokenChain, root_hash

ROOT = root_hash("replay")
GROWTH_TOKENS = 256


@dataclass(slots=True, eq=False)
class Running:
    """`index` is its place in the trace. `epoch` counts its yields: what was scheduled before one is void."""

    index: int
    request: Request
    chain: TokenChain
    holding: Holding | None = None
    cuts: deque[tuple[int, CheckpointKind | None]] = field(default_factory=deque)
    decodes_since_s: float | None = None
    said_tokens: int = 0  # of the reply, in `chain`
    epoch: int = 0

    @property
    def total_tokens(self) -> int:
        return self.request.prompt_tokens + self.request.reply[1]


@dataclass(slots=True)
class Outcome:
    """By request of the trace: tokens that needed no computing; the same had a hit been the minimum over the groups' own
    hits, counted if the state is there. A request that can never fit has none, and is in `refused`."""

    resumed: list[int]
    minimum: list[int]
    refused: list[int] = field(default_factory=list)
    computed_tokens: int = 0  # of prompts, when first admitted
    waited: int = 0
    yields: int = 0
    most_running: int = 0
    running_s: float = 0.0  # summed over requests


class Server:
    def __init__(
        self,
        cache: Cache,
        block_tokens: int,
        interval_tokens: int,
        service: Service,
        max_running: int,
        kinds: frozenset[CheckpointKind] = frozenset(CheckpointKind),
    ) -> None:
        self._cache = cache
        self._block_tokens = block_tokens
        self._interval_tokens = interval_tokens
        self._service = service
        self._max_running = max_running
        self._kinds = kinds
        self._events: list[tuple[float, int, int, Running, Callable[[Running, float], None]]] = []
        self._order = itertools.count()
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []  # in order of admission

    def run(self, requests: Sequence[Request]) -> Outcome:
        self._outcome = Outcome([0] * len(requests), [0] * len(requests))
        for index, request in enumerate(requests):
            self._until(request.arrival_s)
            self._arrive(index, request)
        self._until(math.inf)
        assert not self._waiting and not self._running
        return self._outcome

    def _until(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            at, _, epoch, running, then = heapq.heappop(self._events)
            if epoch == running.epoch:
                self._step(then, running, at)

    def _step(self, then: Callable[[Running, float], None], running: Running, now: float) -> None:
        step = self._cache.begin_step()
        then(running, now)
        self._cache.end_step(step)
        self._admit(now)
        self._cache.drain_events()

    def _after(self, at: float, running: Running, then: Callable[[Running, float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), running.epoch, running, then))

    # -- admission

    def _arrive(self, index: int, request: Request) -> None:
        chain = TokenChain(ROOT, self._block_tokens, request.prompt)
        if request.prompt_tokens + request.reply[1] > self._cache.max_request_tokens():
            self._outcome.refused.append(index)
            return
        self._waiting.append(Running(index, request, chain))
        self._admit(request.arrival_s)
        self._outcome.waited += bool(self._waiting) and self._waiting[-1].index == index
        self._cache.drain_events()

    def _admit(self, now: float) -> None:
        while self._waiting and len(self._running) < self._max_running:
            head = self._waiting[0]
            match = self._cache.match(head.chain)
            again = head.total_tokens if head.epoch else len(head.chain) + GROWTH_TOKENS
            holding = self._cache.reserve(head.chain, min(head.total_tokens, again))
            if holding is None:
                if not self._running:
                    raise TooLong(f"an idle cache refused request {head.index} of {head.total_tokens} tokens")
                return
            self._waiting.popleft()
            self._running.append(head)
            self._outcome.most_running = max(self._outcome.most_running, len(self._running))
            head.holding = holding
            self._outcome.running_s -= now
            if not head.epoch:
                deepest = match.checkpoints[-1] if match.checkpoints else 0
                minimum = min(match.attention_tokens, deepest, len(head.chain) - 1)
                there = minimum if minimum in match.checkpoints else 0
                self._outcome.minimum[head.index] = min(there, holding.resumed_tokens)  # short of room, less is resumed
                self._outcome.resumed[head.index] = holding.resumed_tokens
                self._outcome.computed_tokens += len(head.chain) - holding.resumed_tokens
            self._plan(head, holding, now)

    def _plan(self, running: Running, holding: Holding, now: float) -> None:
        prompt = running.request.prompt_tokens
        cuts = checkpoint_positions(
            holding.resumed_tokens, holding.written_tokens, prompt, self._block_tokens, self._interval_tokens
        )
        running.cuts = deque((at, kind) for at, kind in cuts.items() if kind in self._kinds)
        running.cuts.append((len(running.chain), None))
        self._next_chunk(running, holding, now)

    # -- prefill

    def _next_chunk(self, running: Running, holding: Holding, now: float) -> None:
        tokens = running.cuts[0][0] - holding.position
        self._after(now + self._service.prefill_s(tokens), running, self._computed)

    def _computed(self, running: Running, now: float) -> None:
        holding = running.holding
        assert holding is not None
        at, kind = running.cuts.popleft()
        self._cache.advance(holding, at - holding.position)
        self._cache.commit(holding)
        if kind is not None:
            self._cache.checkpoint(holding, kind)
        if running.cuts:
            self._next_chunk(running, holding, now)
        else:
            self._decode(running, holding, now)

    # -- decode

    def _decode(self, running: Running, holding: Holding, now: float) -> None:
        while not self._cache.extend(holding, running.total_tokens):
            youngest = max(self._running, key=lambda r: r.index)
            self._yield(youngest, now)
            if youngest is running:
                return
        running.decodes_since_s = now
        left = running.request.reply[1] - running.said_tokens
        self._after(now + self._service.decode_s(left), running, self._finished)

    def _finished(self, running: Running, now: float) -> None:
        self._say(running, running.request.reply[1] - 1)  # the last token of a reply is not fed
        self._leave(running, now)

    def _yield(self, running: Running, now: float) -> None:
        if running.decodes_since_s is not None:
            said = int((now - running.decodes_since_s) / max(1e-9, self._service.decode_s(1)))
            self._say(running, min(running.said_tokens + said, running.request.reply[1] - 1))
        self._leave(running, now)
        running.decodes_since_s = None
        running.epoch += 1
        self._waiting.appendleft(running)
        self._outcome.yields += 1

    def _say(self, running: Running, upto_tokens: int) -> None:
        """Feeds the reply up to there."""
        id, _ = running.request.reply
        more = upto_tokens - running.said_tokens
        if more > 0 and running.holding is not None:
            running.chain.append(memoryview(struct.pack("<I", id) * more).cast("I").tolist())
            running.said_tokens = upto_tokens
            self._cache.advance(running.holding, len(running.chain) - running.holding.position)
            self._cache.commit(running.holding)

    def _leave(self, running: Running, now: float) -> None:
        assert running.holding is not None
        self._cache.release(running.holding, donate=CheckpointKind.END in self._kinds)
        running.holding = None
        self._running.remove(running)
        self._outcome.running_s += now
