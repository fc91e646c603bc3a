"""Simulated workers, what both roles share, and those that prefill: one prompt after the other, matched against their own
cache when it begins. They report in a session's messages.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.router.bench.cache import SimCache
from services.router.bench.clock import VirtualClock
from services.router.bench.prompt import RunPrompt
from services.router.bench.timing import Timing
from twinflow.contracts.checkpoints import INTERVAL_STATE_SHARE, checkpoint_positions
from twinflow.contracts.events import EventColumns
from twinflow.contracts.requests import RequestStats
from twinflow.contracts.workers import Load, Pace, WorkerRecord
from twinflow.rpc import convert
from twinflow.rpc.v1 import engine_pb2 as pb

REPORT_S = 0.1  # how often a busy worker reports at least

Send = Callable[[pb.StepReport], None]


@dataclass(slots=True)
class Task:
    """A request at the workers. `whole`: prompt and reply, as the decode worker holds them in the end."""

    id: str
    prompt: RunPrompt
    whole: RunPrompt
    reply_tokens: int
    first_s: float = 0.0
    stats: RequestStats = field(default_factory=RequestStats)


@dataclass(slots=True)
class _Prompt:
    """Being computed, or in the queue for it."""

    task: Task
    done: Callable[[], None]
    begun: Callable[[int, float], None]  # tokens that are there, seconds that the rest takes
    have_tokens: int = 0  # as matched when it came, and again when it begins
    reach_tokens: int = 0
    begun_s: float = 0.0
    ends_s: float = 0.0


class SimWorker:
    """What both roles share: a queue of prompts, computed in order, and reports."""

    def __init__(self, record: WorkerRecord, cache_bytes: int, timing: Timing, clock: VirtualClock, send: Send) -> None:
        self.record = record
        self.cache = SimCache(record, cache_bytes)
        self._timing = timing
        self._clock = clock
        self._send = send
        self._prompts: deque[_Prompt] = deque()
        self._busy_s = 0.0  # with prompts that are done
        self._computed = 0  # tokens of prompts that are done
        self._chunks = 0
        self._reporting = False

    def compute(
        self, task: Task, done: Callable[[], None], begun: Callable[[int, float], None] = lambda have, seconds: None
    ) -> None:
        """In order of arrival; `begun` and `done` are called when the prompt's turn comes and at its end."""
        self._prompts.append(_Prompt(task, done, begun, self.cache.match(task.prompt).usable_tokens))
        if len(self._prompts) == 1:
            self._begin()
        self.report()

    def _begin(self) -> None:
        prompt = self._prompts[0]
        found = self.cache.match(prompt.task.prompt)
        prompt.have_tokens, prompt.reach_tokens = found.usable_tokens, found.reach_tokens
        tokens = prompt.task.prompt.tokens - prompt.have_tokens
        prompt.begun_s = self._clock()
        prompt.ends_s = prompt.begun_s + self._timing.prefill_s(prompt.have_tokens, tokens)
        self._clock.at(prompt.ends_s, self._end)
        prompt.begun(prompt.have_tokens, prompt.ends_s - prompt.begun_s)

    def _end(self) -> None:
        prompt = self._prompts.popleft()
        task, have = prompt.task, prompt.have_tokens
        self._busy_s += prompt.ends_s - prompt.begun_s
        self._computed += task.prompt.tokens - have
        self._chunks += 1
        self.cache.store(task.prompt, self._states(prompt))
        self.computed(task, have, prompt.reach_tokens)
        if self._prompts:
            self._begin()
        prompt.done()
        self.report()

    def _states(self, prompt: _Prompt) -> tuple[int, ...]:
        """Where a real worker keeps them in passing."""
        record, tokens = self.record, prompt.task.prompt.tokens
        interval = -(-INTERVAL_STATE_SHARE * record.slot_bytes // record.block_bytes) * record.block_tokens
        return tuple(
            checkpoint_positions(prompt.have_tokens, prompt.reach_tokens, tokens, record.block_tokens, interval)
        )

    def computed(self, task: Task, have_tokens: int, reach_tokens: int) -> None:
        """A prompt is computed, `have_tokens` of it were there; attention alone had `reach_tokens`."""
        raise NotImplementedError

    # ---- reports ----

    def report(self, outputs: "tuple[pb.Output, ...]" = ()) -> None:
        step = pb.StepReport(outputs=outputs, load=convert.load_to_pb(self.load()))
        if self.cache.events:
            step.event_columns.CopyFrom(convert.event_columns_to_pb(EventColumns.of(self.cache.events)))
            self.cache.events.clear()
        self._send(step)
        if not self._reporting and self.busy:
            self._reporting = True
            self._clock.after(REPORT_S, self._report_again)

    def _report_again(self) -> None:
        self._reporting = False
        self.report()

    @property
    def busy(self) -> bool:
        return bool(self._prompts)

    def load(self) -> Load:
        raise NotImplementedError

    def _prefill_pace(self) -> tuple[float, int, int]:
        """Seconds and tokens of prompts so far, the part of the running one included; and the tokens that are left."""
        seconds, tokens = self._busy_s, self._computed
        if self._prompts:
            head = self._prompts[0]
            passed_s = self._clock() - head.begun_s
            share = passed_s / max(head.ends_s - head.begun_s, 1e-9)
            seconds, tokens = seconds + passed_s, tokens + int(share * (head.task.prompt.tokens - head.have_tokens))
        left = self._computed - tokens + sum(p.task.prompt.tokens - p.have_tokens for p in self._prompts)
        return seconds, tokens, left


class SimPrefill(SimWorker):
    def _states(self, prompt: _Prompt) -> tuple[int, ...]:
        """The slot is donated when its lease ends: the state behind the whole prompt."""
        return (*super()._states(prompt), prompt.task.prompt.tokens)

    def computed(self, task: Task, have_tokens: int, reach_tokens: int) -> None:
        task.stats = replace(
            task.stats,
            prefill_worker=self.record.id,
            prefill_attention_tokens=reach_tokens,
            prefill_resumed_tokens=have_tokens,
            cached_tokens=have_tokens,
        )

    def load(self) -> Load:
        seconds, tokens, left = self._prefill_pace()
        pace = Pace(self._chunks + int(10 * seconds), seconds, tokens, 0)
        return Load(len(self._prompts), 0, left, total_slots=256, pace=pace)
