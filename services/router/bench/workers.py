"""Simulated workers: they take submissions, match their own caches, decide as real ones do, and report in a session's messages.

A prefill worker computes one prompt after the other. A decode worker steps all of its sequences at once; a prompt that it
computes itself makes them stand still. The first token leaves when the prompt is computed; decoding begins when the blocks that
were missing and the state have been read, which goes on while the prompt is computed.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from services.router.bench.cache import SimCache
from services.router.bench.clock import VirtualClock
from services.router.bench.prompt import RunPrompt
from services.router.bench.timing import Timing
from twinflow.contracts.checkpoints import INTERVAL_STATE_SHARE, checkpoint_positions
from twinflow.contracts.requests import FinishReason, RequestStats, Sample
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
    stats: RequestStats = field(default_factory=RequestStats)


@dataclass(slots=True)
class _Prompt:
    """Being computed, or in the queue for it."""

    task: Task
    done: Callable[[], None]
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

    def compute(self, task: Task, done: Callable[[], None]) -> None:
        """In order of arrival; `done` is called at the end of the prompt."""
        self._prompts.append(_Prompt(task, done, self.cache.match(task.prompt).usable_tokens))
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
        """Where a real worker keeps them."""
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
        events = [convert.event_to_pb(e) for e in self.cache.events]
        self.cache.events.clear()
        self._send(pb.StepReport(outputs=outputs, events=events, load=convert.load_to_pb(self.load())))
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


class SimDecode(SimWorker):
    """`steps` counts fractions: between two changes all sequences advance at the same speed."""

    def __init__(
        self,
        record: WorkerRecord,
        cache_bytes: int,
        timing: Timing,
        clock: VirtualClock,
        send: Send,
        prefill: Mapping[str, SimPrefill],
    ) -> None:
        super().__init__(record, cache_bytes, timing, clock, send)
        self._prefill = prefill
        self._slots = record.load.total_slots
        self._running: dict[str, tuple[float, Task]] = {}  # by id: step after which it ends
        self._joining: deque[Task] = deque()
        self._context = 0.0  # tokens of all running sequences
        self._steps = 0.0
        self._decoded = 0.0
        self._step_busy_s = 0.0
        self._at_s = 0.0  # of these numbers
        self._version = 0  # of the plan for the next end
        self._still = False  # no step is made: a prompt is computed

    def submit(self, message: pb.Submit, task: Task) -> None:
        found = self.cache.match(task.prompt)
        tokens = task.prompt.tokens
        task.stats = RequestStats(
            prompt_tokens=tokens,
            decode_worker=self.record.id,
            decode_attention_tokens=found.reach_tokens,
            reason=message.reason,
        )
        if not message.candidates or tokens - found.usable_tokens <= message.local_max_tokens:
            task.stats = replace(task.stats, route="local")
            self.compute(task, lambda: self._first_token(task, 0))
            return
        task.stats = replace(task.stats, route="remote")
        missing = -(-(tokens - found.reach_tokens) // self.record.block_tokens) * self.record.block_bytes
        begun_s, peer = self._clock(), self._prefill[message.candidates[0].worker_id]
        peer.compute(task, lambda: self._computed_there(task, begun_s, missing))

    def computed(self, task: Task, have_tokens: int, reach_tokens: int) -> None:
        task.stats = replace(task.stats, decode_resumed_tokens=have_tokens, cached_tokens=have_tokens)

    def _computed_there(self, task: Task, begun_s: float, missing_bytes: int) -> None:
        """Blocks moved while the prompt was computed; what did not fit in that time and the state are still to come."""
        blocks_s = self._timing.transfer_s(missing_bytes)
        last_s = self._timing.transfer_s(min(missing_bytes, self.record.block_bytes))
        hidden_s = min(blocks_s - last_s, self._clock() - begun_s)
        size = missing_bytes + self.record.slot_bytes
        task.stats = replace(task.stats, bytes_moved=size, transfer_s=self._timing.transfer_s(size))
        wait_s = blocks_s - hidden_s + self._timing.transfer_s(self.record.slot_bytes) + self._timing.link_s
        self.cache.store(task.prompt)
        self._first_token(task, wait_s)

    def _first_token(self, task: Task, wait_s: float) -> None:
        if task.reply_tokens == 1:
            self._finish(task)
            return
        self.report((pb.Output(id=task.id, samples=convert.samples_to_pb([Sample(0)])),))
        self._clock.after(wait_s, lambda: self._join(task))

    # ---- steps ----

    def _join(self, task: Task) -> None:
        self._joining.append(task)
        self._change()

    def _change(self) -> None:
        """Brings everything up to now: sequences that are over leave, others join, the next end is planned."""
        self._advance()
        over = [task for end, task in self._running.values() if end <= self._steps + 1e-6]
        for task in over:
            del self._running[task.id]
            self._context -= task.whole.tokens
        while self._joining and len(self._running) < self._slots:
            task = self._joining.popleft()
            self._running[task.id] = (self._steps + task.reply_tokens - 1, task)
            self._context += task.prompt.tokens
        for task in over:
            self._finish(task)
        self._version += 1
        if self._running and not self._prompts:
            left = min(end for end, _ in self._running.values()) - self._steps
            version = self._version
            self._clock.after(left * self._step_s(), lambda: self._change() if version == self._version else None)

    def _advance(self) -> None:
        now = self._clock()
        if self._running and not self._still:
            passed_s = now - self._at_s
            steps = passed_s / self._step_s()
            self._steps += steps
            self._decoded += steps * len(self._running)
            self._context += steps * len(self._running)
            self._step_busy_s += passed_s
        self._at_s = now

    def _begin(self) -> None:
        self._advance()
        self._still = True
        super()._begin()
        self._version += 1

    def _end(self) -> None:
        self._advance()
        super()._end()
        self._still = bool(self._prompts)
        self._change()

    def _step_s(self) -> float:
        return self._timing.step_s(len(self._running), int(self._context))

    def _finish(self, task: Task) -> None:
        self.cache.store(task.whole, (task.whole.tokens - 1,))
        last = Sample(0, FinishReason.LENGTH)
        output = pb.Output(id=task.id, samples=convert.samples_to_pb([last]), stats=convert.stats_to_pb(task.stats))
        self.report((output,))

    @property
    def busy(self) -> bool:
        return bool(self._prompts or self._running)

    def load(self) -> Load:
        self._advance()
        seconds, tokens, left = self._prefill_pace()
        pace = Pace(int(self._steps) + self._chunks, self._step_busy_s + seconds, tokens, int(self._decoded))
        running = len(self._running) + len(self._prompts)
        slots = self._slots
        return Load(running, len(self._joining), left, free_slots=slots - running, total_slots=slots, pace=pace)
