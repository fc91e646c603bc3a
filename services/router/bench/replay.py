"""One replay: sessions of a trace through the router's own view and choice to simulated workers.

Admission is the same for every policy: a leaky bucket of the work that requests would be for one cache with the memory of all
prefill workers. What it sheds is shed before any worker is looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from services.router.bench.cache import SimCache
from services.router.bench.clock import VirtualClock
from services.router.bench.decode import SimDecode
from services.router.bench.links import Links
from services.router.bench.prompt import Run, RunPrompt
from services.router.bench.timing import Timing
from services.router.bench.trace import Session
from services.router.bench.wire import Disturbance, Wire
from services.router.bench.workers import SimPrefill, SimWorker, Task
from services.router.dispatch.submission import submission
from services.router.schedule.base import Choice, Policy, RouteRequest
from services.router.schedule.choose import choose
from services.router.view.view import View, ViewSettings
from twinflow.contracts.errors import TwinflowError
from twinflow.contracts.requests import RequestStats, Sample, SamplingParams
from twinflow.contracts.workers import Load, Role, WorkerRecord

MODEL, FINGERPRINT = "replay", "replay"
SUBMIT_S = 0.001  # from the choice to the decode worker
MAX_TOKENS = 4096  # what clients ask for: how long a reply gets nobody knows before
WARM_UP = 0.1  # of the requests, not counted


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster and what is wrong with it. Sizes are those of a 4B hybrid: 32,768 B of KV a token, 51,511,296 B a state."""

    prefill: int = 4
    decode: int = 4
    cache_bytes: int = 112 << 30  # of each worker
    block_tokens: int = 512  # nothing finer is shared in these traces
    token_bytes: int = 32_768
    slot_bytes: int = 51_511_296
    decode_slots: int = 256
    admitted: float = 0.85  # of the prefill workers' time: work beyond that is shed
    burst_s: float = 2.0  # of such work that may wait, per prefill worker
    timing: Timing = field(default_factory=Timing)
    disturbance: Disturbance = field(default_factory=Disturbance)
    seed: int = 0

    def record(self, id: str, role: Role) -> WorkerRecord:
        limit, load = 1 << 24, Load(total_slots=self.decode_slots, free_slots=self.decode_slots)
        return WorkerRecord(
            id, "i", role, (f"{id}:1",), MODEL, FINGERPRINT, limit, limit, self.block_tokens, load=load,
            block_bytes=self.token_bytes * self.block_tokens, slot_bytes=self.slot_bytes,
        )  # fmt: skip


@dataclass(slots=True)
class Asked:
    """One request of a session, with what came of it. Times are virtual seconds."""

    id: str
    prompt: RunPrompt
    whole: RunPrompt
    reply_tokens: int
    delay_s: float
    work_s: float = 0.0  # prefill that one cache of all memory would have left
    asked_s: float = 0.0
    first_s: float | None = None
    ended_s: float | None = None
    shed: bool = False
    choice: Choice | None = None
    stats: RequestStats = field(default_factory=RequestStats)


@dataclass(slots=True)
class Workload:
    """Sessions ready to be asked; the same object serves any number of replays. `work_s` of all requests together."""

    starts_s: list[float]
    sessions: list[list[Asked]]
    work_s: float
    span_s: float  # of the trace, which a replay stretches as a whole


def prepare(sessions: Sequence[Session], setup: Setup) -> Workload:
    """Hashes every prompt once and measures the work."""
    made = [_asked(number, session, setup) for number, session in enumerate(sessions)]
    free = replace(setup.record("all", Role.PREFILL), slot_bytes=0)
    together = SimCache(free, setup.prefill * setup.cache_bytes)
    order = []
    for session, asked in zip(sessions, made, strict=True):
        at_s = session.start_s
        for each in asked:
            at_s += each.delay_s
            order.append((at_s, each))
    for _, each in sorted(order, key=lambda pair: pair[0]):
        usable = together.match(each.prompt).usable_tokens
        each.work_s = setup.timing.prefill_s(usable, each.prompt.tokens - usable)
        size = setup.block_tokens
        boundaries = tuple(
            range(size, each.prompt.tokens, size)
        )  # a state at every one, so that nothing is out of reach
        together.store(each.whole, (*boundaries, each.whole.tokens - 1))
        together.events.clear()
    starts, times = [s.start_s for s in sessions], [at_s for at_s, _ in order]
    return Workload(starts, made, sum(each.work_s for _, each in order), max(times) - min(starts))


def _asked(number: int, session: Session, setup: Setup) -> list[Asked]:
    made: list[Asked] = []
    history: RunPrompt | None = None
    for turn_number, turn in enumerate(session.turns):
        runs = (*(history.runs if history is not None else ()), *turn.new)
        prompt = RunPrompt(runs, FINGERPRINT, setup.block_tokens, history)
        history = RunPrompt((*runs, Run(turn.reply_id, turn.reply_tokens)), FINGERPRINT, setup.block_tokens, prompt)
        made.append(Asked(f"{number}-{turn_number}", prompt, history, turn.reply_tokens, turn.delay_s))
    return made


class Replay:
    def __init__(self, workload: Workload, setup: Setup, policy: Policy, load: float) -> None:
        """`load` 1: the work that arrives is just what the prefill workers could do, if they shared one cache."""
        self.clock = VirtualClock()
        self.view = View(ViewSettings(), self.clock)
        self.asked: list[Asked] = []
        self._links = Links(self.clock, setup.timing.link_bytes_per_s)
        self.prefill: dict[str, SimPrefill] = {}
        self.decode: dict[str, SimDecode] = {}
        self._workload, self._setup, self._policy = workload, setup, policy
        self._random = Random(setup.seed)
        self._takers: dict[str, _Taker] = {}
        self._turn = 0
        self._bucket_s, self._bucket_at_s = 0.0, 0.0
        self.span_s = workload.work_s / (load * setup.prefill)
        self._stretch = self.span_s / workload.span_s if workload.span_s else 1.0
        for role, count in ((Role.PREFILL, setup.prefill), (Role.DECODE, setup.decode)):
            for i in range(count):
                self._add(setup.record(f"{role.value}-{i}", role))

    def _add(self, record: WorkerRecord) -> None:
        self.view.put(record)
        self.view.set_connected(record.key, True)
        wire = Wire(record, self.view, self._takers, self.clock, self._setup.disturbance, self._random)
        setup = self._setup
        if record.role is Role.PREFILL:
            self.prefill[record.id] = SimPrefill(record, setup.cache_bytes, setup.timing, self.clock, wire.send)
        else:
            self.decode[record.id] = SimDecode(
                record, setup.cache_bytes, setup.timing, self.clock, wire.send, self.prefill, self._links
            )

    def run(self) -> list[Asked]:
        """All requests, in the order in which they were asked, without those of the sessions that come first: the warm-up, the
        same for every policy."""
        starts = self._workload.starts_s
        first, last = min(starts), max(starts)
        for number, session in enumerate(self._workload.sessions):
            share = (starts[number] - first) / (last - first) if last > first else number / len(starts)
            self.clock.at(share * self.span_s, lambda s=session: self._begin(s))  # type: ignore[misc]
        self.clock.run()
        counted = self._counted()
        return [each for each in self.asked if each.id in counted]

    def _counted(self) -> set[str]:
        starts, sessions = self._workload.starts_s, self._workload.sessions
        in_order = [each.id for k in sorted(range(len(sessions)), key=starts.__getitem__) for each in sessions[k]]
        return set(in_order[int(WARM_UP * len(in_order)) :])

    def _begin(self, session: Sequence[Asked]) -> None:
        """Sessions are admitted as a whole, so that what is asked does not depend on the policy."""
        now, setup = self.clock(), self._setup
        self._bucket_s = max(0.0, self._bucket_s - (now - self._bucket_at_s) * setup.prefill * setup.admitted)
        self._bucket_at_s = now
        work_s = sum(each.work_s for each in session)
        if self._bucket_s + work_s > setup.burst_s * setup.prefill:
            self.asked += [_fresh(each, now, shed=True) for each in session]
            return
        self._bucket_s += work_s
        self._ask(session, 0)

    def _ask(self, session: Sequence[Asked], index: int) -> None:
        each = _fresh(session[index], self.clock())
        self.asked.append(each)
        self._turn += 1
        request = RouteRequest(MODEL, each.prompt.tokens, MAX_TOKENS, self._random.getrandbits(64), self._turn)
        try:
            choice = choose(self.view.snapshot(each.prompt), request, self._policy)
        except TwinflowError:
            each.shed = True
            return
        self.view.charge(each.id, choice, each.prompt)
        each.choice = choice
        task = Task(each.id, each.prompt, each.whole, each.reply_tokens)
        self._takers[each.id] = _Taker(self, each, session, index)
        sampling = SamplingParams(MAX_TOKENS, 0)
        message = submission(each.id, each.id, b"", each.prompt.root(FINGERPRINT), sampling, choice).submit
        self.clock.after(SUBMIT_S, lambda: self.decode[choice.decode.id].submit(message, task))

    def ended(self, each: Asked, session: Sequence[Asked], index: int) -> None:
        del self._takers[each.id]
        assert each.choice is not None
        self.view.finished(each.id)
        self.view.learn(each.choice, each.stats, each.reply_tokens)
        self.view.replied(each.choice, each.prompt.keys_of_reply(each.choice.decode, each.whole))
        if index + 1 < len(session):
            self.clock.after(self._stretch * session[index + 1].delay_s, lambda: self._ask(session, index + 1))

    @property
    def workers(self) -> list[SimWorker]:
        return [*self.prefill.values(), *self.decode.values()]


def _fresh(each: Asked, now_s: float, shed: bool = False) -> Asked:
    return Asked(
        each.id, each.prompt, each.whole, each.reply_tokens, each.delay_s, each.work_s, asked_s=now_s, shed=shed
    )


class _Taker:
    """What the router would do with a request's tokens."""

    def __init__(self, replay: Replay, asked: Asked, session: Sequence[Asked], index: int) -> None:
        self.stats: RequestStats | None = None
        self.begun = True  # nobody waits in virtual time
        self._replay, self._asked, self._session, self._index = replay, asked, session, index

    def put_token(self, token_id: int) -> None:
        self.put((Sample(token_id),))

    def put(self, samples: Sequence[Sample]) -> None:
        asked, replay = self._asked, self._replay
        if samples and asked.first_s is None:
            asked.first_s = replay.clock()
            replay.view.prefilled(asked.id)
        if samples and samples[-1].finish is not None:
            asked.ended_s = replay.clock()
            asked.stats = self.stats or asked.stats
            replay.ended(asked, self._session, self._index)

    def fail(self, error: TwinflowError) -> None:
        raise AssertionError(f"simulated workers do not fail: {error}")
