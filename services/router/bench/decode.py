"""Simulated decode workers: they take submissions, match their own caches and decide as real ones do.

All sequences step at once; a prompt that the worker computes itself makes them stand still. Of a hand-off the first token leaves
when the prompt is computed; decoding begins when the blocks that were missing and the state have been read, which goes on while
the prompt is computed. A request needs memory for what it does not find here before anything is read; who gets none waits in
line, in order of arrival.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from services.router.bench.cache import Held
from services.router.bench.clock import VirtualClock
from services.router.bench.links import Links, Read
from services.router.bench.timing import Timing
from services.router.bench.workers import Send, SimPrefill, SimWorker, Task
from twinflow.contracts.requests import FinishReason, RequestStats, Sample
from twinflow.contracts.workers import Load, Pace, WorkerRecord
from twinflow.rpc import convert
from twinflow.rpc.v1 import engine_pb2 as pb

CHUNK_TOKENS = 8192  # of a prompt, whose blocks are announced together


class _Handoff:
    """Of one request from one prefill worker. What is announced before there is memory for it is read afterwards."""

    def __init__(self, links: Links, read: Read) -> None:
        self._links, self._read = links, read
        self._early_bytes = 0.0
        self._has_memory = False

    def announced(self, size_bytes: float) -> None:
        if self._has_memory:
            self._links.announce(self._read, size_bytes)
        else:
            self._early_bytes += size_bytes

    def reserved(self) -> None:
        self._has_memory = True
        self._links.announce(self._read, self._early_bytes)


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
        links: Links,
    ) -> None:
        super().__init__(record, cache_bytes, timing, clock, send)
        self._prefill = prefill
        self._links = links
        self._slots = record.load.total_slots
        self._total_blocks = cache_bytes // record.block_bytes
        self._held: dict[str, Held] = {}
        self._lacking: deque[tuple[Task, int, Callable[[], None]]] = deque()  # memory; with its reach, and what then
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
            self._reserve(task, found.reach_tokens, lambda: self.compute(task, lambda: self._computed_here(task)))
            return
        task.stats = replace(task.stats, route="remote")
        self._hand_off(task, found.reach_tokens, self._wanted(message, task, found.usable_tokens), message)

    def computed(self, task: Task, have_tokens: int, reach_tokens: int) -> None:
        task.stats = replace(task.stats, decode_resumed_tokens=have_tokens, cached_tokens=have_tokens)

    def _computed_here(self, task: Task) -> None:
        self.cache.received(self._held[task.id], task.prompt)
        self._first_token(task)
        self._join(task)

    # ---- memory ----

    def _reserve(self, task: Task, reach_tokens: int, then: Callable[[], None]) -> None:
        self._lacking.append((task, reach_tokens, then))
        self._serve()

    def _serve(self) -> None:
        """Those that lack memory, in order, as far as it goes; somebody always has some."""
        while self._lacking:
            task, reach_tokens, then = self._lacking[0]
            record = self.record
            blocks = -(-task.whole.tokens // record.block_tokens) - reach_tokens // record.block_tokens
            needs = blocks * record.block_bytes + record.slot_bytes
            held = self.cache.hold(task.prompt, reach_tokens, needs, force=not self._held)
            if held is None:
                return
            self._lacking.popleft()
            self._held[task.id] = held
            then()

    # ---- hand-off ----

    def _wanted(self, message: pb.Submit, task: Task, usable_tokens: int) -> int:
        """Where a state would let later siblings run here, 0 = nowhere: as `services.decode.claim` has it."""
        reach, tokens = task.stats.decode_attention_tokens, task.prompt.tokens
        at = min(reach, tokens - 1) // self.record.block_tokens * self.record.block_tokens
        return at if at > usable_tokens and tokens - at <= message.local_max_tokens else 0

    def _hand_off(self, task: Task, reach_tokens: int, want_at: int, message: pb.Submit) -> None:
        record, tokens = self.record, task.prompt.tokens
        have = reach_tokens // record.block_tokens * record.block_tokens
        states = record.slot_bytes * (2 if want_at else 1)
        missing = -(-(tokens - have) // record.block_tokens) * record.block_bytes
        peer = self._prefill[message.candidates[0].worker_id]
        waits = {"computed", "read"}

        def ended(what: str) -> None:
            waits.discard(what)
            if not waits:
                task.stats = replace(task.stats, bytes_moved=read.size_bytes, transfer_s=read.busy_s)
                self._clock.after(self._timing.link_s, lambda: self._confirmed(task, want_at))

        read = Read(peer.record.id, record.id, missing + states, lambda: ended("read"))
        handoff = _Handoff(self._links, read)

        def begun(there: int, seconds: float) -> None:
            self._reserve(task, reach_tokens, handoff.reserved)
            cached = max(0, there - have) / (tokens - have) * missing
            handoff.announced(cached)
            chunks = -(-(tokens - there) // CHUNK_TOKENS)
            for k in range(1, chunks):
                self._clock.after(seconds * k / chunks, lambda: handoff.announced((missing - cached) / chunks))
            self._clock.after(seconds, lambda: handoff.announced((missing - cached) / chunks + states))

        def computed() -> None:
            self._first_token(task)
            ended("computed")

        peer.compute(task, computed, begun)

    def _confirmed(self, task: Task, want_at: int) -> None:
        self.cache.received(self._held[task.id], task.prompt)
        if want_at:
            self.cache.store(task.prompt, (want_at,))
        self._join(task)

    def _first_token(self, task: Task) -> None:
        task.first_s = self._clock()
        if task.reply_tokens > 1:
            self.report((pb.Output(id=task.id, samples=convert.samples_to_pb([Sample(0)])),))

    # ---- steps ----

    def _join(self, task: Task) -> None:
        if task.reply_tokens == 1:
            self._finish(task)
            return
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
            task.stats.extra["stood_s"] = self._clock() - task.first_s
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
        self.cache.release(self._held.pop(task.id))
        self.cache.store(task.whole, (task.whole.tokens - 1,))
        last = Sample(0, FinishReason.LENGTH)
        output = pb.Output(id=task.id, samples=convert.samples_to_pb([last]), stats=convert.stats_to_pb(task.stats))
        self.report((output,))
        self._serve()

    @property
    def busy(self) -> bool:
        return bool(self._prompts or self._running or self._lacking)

    def load(self) -> Load:
        self._advance()
        seconds, tokens, left = self._prefill_pace()
        pace = Pace(int(self._steps) + self._chunks, self._step_busy_s + seconds, tokens, int(self._decoded))
        running = len(self._running) + len(self._prompts)
        slots = self._slots
        return Load(
            running,
            len(self._joining) + len(self._lacking),
            left,
            free_blocks=max(0, self.cache.free_bytes // self.record.block_bytes),
            total_blocks=self._total_blocks,
            free_slots=slots - running,
            total_slots=slots,
            pace=pace,
        )
