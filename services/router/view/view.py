"""The view: every known worker with what it holds, how busy and how fast it is, and what this router has charged to it.

One event loop owns it. `snapshot` is what a choice is made from; everything else reports facts.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from services.router.schedule.base import NO_RATES, REMOTE, Choice, Snapshot, WorkerFacts
from services.router.schedule.rates import Rates
from services.router.view.breakers import Breakers
from services.router.view.charges import Charges
from services.router.view.feed import Feed
from services.router.view.index import HitIndex, Holdings, expected_states
from services.router.view.prompt import PromptKeys, ReplyKeys
from services.router.view.traffic import Traffic
from twinflow.contracts.events import CacheEvent
from twinflow.contracts.requests import RequestStats
from twinflow.contracts.workers import Load, Role, WorkerRecord
from twinflow.node.pulse import ENGINE_SILENCE_S

Key = tuple[str, str]  # worker id, incarnation
Clock = Callable[[], float]

EVENTS_LATE_S = 10.0  # entries are expected for so long after they should be there
SHORT_TOKENS = 1024  # of a prompt: to come back for its hashes costs more than it spares
STALL_STEPS = 20  # a step may take so many times the usual before it counts as hanging
REPLY_WEIGHT = 0.02  # of the newest reply in the mean length


@dataclass(frozen=True, slots=True)
class ViewSettings:
    index_bytes: int = 1 << 30
    stall_s: float = 10.0  # without a step while something runs: the worker hangs


@dataclass(slots=True)
class _Worker:
    record: WorkerRecord
    feed: Feed
    connected: bool = False
    charges: Charges = field(default_factory=Charges)
    traffic: Traffic = field(default_factory=Traffic)
    rates: Rates = NO_RATES
    heard_s: float = 0.0  # of the last load
    engine_silent_s: float = 0.0  # as its front said last
    full_at: int = 0  # see `full_at`
    facts: WorkerFacts | None = None  # without hits, until any of the above changes


class View:
    def __init__(self, settings: ViewSettings | None = None, clock: Clock = time.monotonic) -> None:
        self._settings = settings or ViewSettings()
        self._clock = clock
        self._workers: dict[Key, _Worker] = {}
        self._index = HitIndex(self._settings.index_bytes)
        self._fleet: dict[tuple[str, Role], Rates] = {}  # by fingerprint and role: of all workers together
        self._reply_tokens: float | None = None
        self._charged: dict[str, list[_Worker]] = {}  # by request
        self._coming: list[tuple[_Worker, Feed, Choice, PromptKeys, bool, float]] = []  # see `_expect`
        self.breakers = Breakers(clock)

    def __len__(self) -> int:
        """Workers that are known."""
        return len(self._workers)

    # ---- facts come in ----

    def put(self, record: WorkerRecord) -> None:
        """From the registry. A new incarnation is a new worker of which nothing is known."""
        known = self._workers.get(record.key)
        if known is None:
            self._workers[record.key] = _Worker(record, Feed(self._index))
        else:
            load = known.record.load if known.connected else record.load  # the session's load is fresher
            known.record, known.facts = record.with_load(load), None

    def remove(self, key: Key) -> None:
        worker = self._workers.pop(key, None)
        if worker is not None:
            worker.feed.close()
            self.breakers.forget(key[0])

    def set_connected(self, key: Key, connected: bool) -> None:
        """A session that (re)starts knows nothing of what the worker holds: events of the time between are lost."""
        worker = self._workers.get(key)
        if worker is not None:
            worker.connected, worker.facts = connected, None
            worker.heard_s, worker.engine_silent_s = self._clock(), 0.0
            worker.feed.close()
            worker.feed = Feed(self._index)

    def is_connected(self, key: Key) -> bool:
        return key in self._workers and self._workers[key].connected

    def set_load(self, key: Key, load: Load) -> None:
        worker = self._workers.get(key)
        if worker is None:
            return
        before, now = worker.record.load.pace, load.pace
        computed_tokens = now.prefill_tokens - before.prefill_tokens
        computing_tokens = worker.charges.computing_tokens(computed_tokens)
        worker.heard_s, worker.facts = self._clock(), None
        worker.record = worker.record.with_load(load)
        worker.full_at = full_at(worker.full_at, load)
        worker.charges.reported(computed_tokens)
        if now.steps != before.steps:
            worker.rates = worker.rates.paced(before, now, computing_tokens)
            like = (worker.record.fingerprint, worker.record.role)
            self._fleet[like] = self._fleet.get(like, NO_RATES).paced(before, now, computing_tokens)

    def set_engine_silence(self, key: Key, silent_s: float) -> None:
        """What a worker's front says: for how long its engine's process has said nothing."""
        worker = self._workers.get(key)
        if worker is not None:
            worker.engine_silent_s = silent_s

    def apply(self, key: Key, events: Iterable[CacheEvent]) -> bool:
        """True: a gap has opened, ask the worker for a snapshot."""
        worker = self._workers.get(key)
        return worker is not None and worker.feed.apply(events)

    def replace(self, key: Key, sequence: int, contents: Iterable[CacheEvent]) -> bool:
        """A snapshot arrived. True: events are still missing, ask again."""
        worker = self._workers.get(key)
        return worker is not None and worker.feed.replace(sequence, contents)

    def learn(self, choice: Choice, stats: RequestStats, reply_tokens: int) -> None:
        """A request has ended well: what its hand-off moved how fast, who failed it, how long the reply was."""
        mean = self._reply_tokens
        self._reply_tokens = reply_tokens if mean is None else mean + REPLY_WEIGHT * (reply_tokens - mean)
        decode = self._workers.get(choice.decode.key)
        if decode is not None and stats.bytes_moved:
            decode.rates, decode.facts = decode.rates.moved(stats), None
            like = (choice.decode.fingerprint, choice.decode.role)
            anonymous = dataclasses.replace(stats, prefill_worker="any")
            self._fleet[like] = self._fleet.get(like, NO_RATES).moved(anonymous)
        self.breakers.worked(("", choice.decode.id))
        if stats.faulty_prefill_workers:
            offered = {c.record.id: c.record.key for c in choice.candidates}
            for prefill_id in stats.faulty_prefill_workers:
                if offered.get(prefill_id) in self._workers:  # the faults of one that is gone are not its next one's
                    self.breakers.failed((prefill_id, choice.decode.id))
        if stats.prefill_worker:
            self.breakers.worked((stats.prefill_worker, choice.decode.id))

    # ---- charges ----

    def charge(self, request_id: str, choice: Choice, prompt: PromptKeys | None = None) -> None:
        """The decode worker runs one more; whoever prefills has that much more to compute, and will hold the prompt's blocks
        (so will the decode worker, which receives them: over the links of both)."""
        charged: list[_Worker] = []
        prefill = decode = self._workers.get(choice.decode.key)
        if decode is not None:
            decode.charges.run(request_id)
            charged.append(decode)
        if choice.kind is REMOTE:
            prefill = self._workers.get(choice.candidates[0].record.key)
            if prefill is not None:
                charged.append(prefill)
        if prefill is not None:
            prefill.charges.prefill(request_id, choice.prefill_tokens)
        self._charged[request_id] = charged
        now = self._clock()
        for worker in charged:
            worker.facts = None
            if prompt is None:
                continue
            if choice.kind is REMOTE:
                worker.traffic.hand_off(request_id, choice, prompt.tokens, now)
            if prompt.tokens <= SHORT_TOKENS:
                self._expect(worker, worker.feed, choice, prompt, worker is prefill, now)
            else:
                self._coming.append((worker, worker.feed, choice, prompt, worker is prefill, now))

    @property
    def is_behind(self) -> bool:
        """Something is left to `catch_up` with."""
        return bool(self._coming)

    def catch_up(self) -> None:
        """What the prompts that were charged will leave is expected from now on. `snapshot` does that in any case; whoever calls
        it before has less to do between a request and its answer: it takes the hashes of whole prompts."""
        if self._coming:
            coming, self._coming = self._coming, []
            for each in coming:
                self._expect(*each)

    def _expect(
        self, worker: _Worker, feed: Feed, choice: Choice, prompt: PromptKeys, computes: bool, at_s: float
    ) -> None:
        """A prompt was charged then to a worker, which `computes` it or receives it. The feed is that of then."""
        column, record, terms = feed.column, worker.record, choice.terms
        if column is None:  # what the worker holds was forgotten meanwhile
            return
        keys = prompt.block_numbers(record)
        if computes:
            resumed = prompt.tokens - choice.prefill_tokens
            keys = keys + expected_states(record, keys, prompt.tokens, resumed, choice.prefill_attention_tokens)
        until_s = at_s + (terms.get("wait", 0.0) + terms.get("prefill", 0.0)) / 1e3 + EVENTS_LATE_S
        self._index.expected.add(column, keys, until_s, at_s)

    def prefilled(self, request_id: str) -> None:
        """Its first token came: nobody prefills for it any more."""
        for worker in self._charged.get(request_id, ()):
            worker.charges.prefilled(request_id)
            worker.facts = None

    def replied(self, choice: Choice, reply: ReplyKeys) -> None:
        """A reply is over, and its decode worker holds it: the next turn may be here before the events that tell so."""
        worker, now = self._workers.get(choice.decode.key), self._clock()
        if worker is not None and worker.feed.column is not None:
            self._index.expect_reply(worker.feed.column, reply, now + EVENTS_LATE_S, now)

    def finished(self, request_id: str) -> None:
        for worker in self._charged.pop(request_id, ()):
            worker.charges.ended(request_id)
            worker.traffic.ended(request_id)
            worker.facts = None

    # ---- facts go out ----

    def snapshot(self, prompt: PromptKeys | None = None, detail: bool = False) -> Snapshot:
        """All workers now; with `prompt`, its hits at those that could serve it. `detail`: every checkpoint, not only the one
        that counts."""
        self.catch_up()
        now = self._clock()
        holdings: dict[tuple[str, int], Holdings | None] = {}
        facts = []
        for worker in self._workers.values():
            found, record = None, worker.record
            if prompt is not None and worker.connected and record.block_tokens and worker.feed.column is not None:
                layout = (record.fingerprint, record.block_tokens)
                if layout not in holdings:
                    nobody = self._index.nobody(record, prompt)
                    holdings[layout] = None if nobody else self._index.holdings(record, prompt, now)
                found = holdings[layout]
            facts.append(self._facts(worker, found, detail, now))
        return Snapshot(tuple(facts), self._fleet.copy(), self.breakers.open(), self._reply_tokens)

    def each(self, role: Role | None = None) -> Iterator[WorkerFacts]:
        """The load of every worker (of a role) now, made as it is asked for; nothing may change meanwhile."""
        now = self._clock()
        for worker in self._workers.values():
            if role is None or worker.record.role is role:
                yield self._facts(worker, None, False, now)

    @property
    def fleet(self) -> Mapping[tuple[str, Role], Rates]:
        """Rates of all workers of a fingerprint and role together."""
        return self._fleet

    def _facts(self, worker: _Worker, found: Holdings | None, detail: bool, now_s: float) -> WorkerFacts:
        load, charges, column = worker.record.load, worker.charges, worker.feed.column
        stalled = self._stalled_s(worker, now_s) > 0
        moving_bytes = worker.traffic.left_bytes(now_s) if worker.traffic.reads else 0.0
        reach = 0
        checkpoints: tuple[int, ...] = ()
        if found is not None and column is not None and found.reach[column]:
            reach = int(found.reach[column])
            deepest = int(found.deepest[column])
            checkpoints = found.checkpoints(column) if detail else (deepest,) if deepest else ()
        elif (known := worker.facts) is not None and known.stalled == stalled and known.moving_bytes == moving_bytes:
            return known
        waiting = charges.waiting_prompts
        facts = WorkerFacts(  # by place: names of ten arguments cost as much as the object
            worker.record,
            worker.connected,
            charges.active_requests(load),
            charges.queued_prefill_tokens(load),
            waiting if waiting > load.waiting else load.waiting,
            stalled,
            worker.full_at,
            reach,
            checkpoints,
            worker.rates,
            worker.traffic.reads,
            moving_bytes,
        )
        if not reach:
            worker.facts = facts
        return facts

    def held_up(self, late_s: float) -> None:
        """For so long this process could not hear what workers report."""
        now = self._clock()
        for worker in self._workers.values():
            worker.heard_s = min(now, worker.heard_s + late_s)

    def engine_silent(self, key: Key) -> bool:
        """Its front says that its engine's process stands still."""
        worker = self._workers.get(key)
        return worker is not None and stands_still(worker)

    def stall(self, key: Key) -> str:
        """What keeps everything at this worker from getting on, to be said after its name; "" if nothing does."""
        worker = self._workers.get(key)
        stalled_s = self._stalled_s(worker, self._clock()) if worker is not None else 0.0
        if worker is None or not stalled_s:
            return ""
        if stands_still(worker):
            return f"has heard nothing from its engine process for {stalled_s:.1f} s"
        return f"has made no step for {stalled_s:.1f} s while requests run there"

    def _stalled_s(self, worker: _Worker, now_s: float) -> float:
        """For how long its engine's process has said nothing, or with running requests has not made a step, if that is too long;
        else 0."""
        load = worker.record.load
        if not worker.connected:
            return 0.0
        if stands_still(worker):
            return worker.engine_silent_s
        if not (load.running and load.pace.steps):
            return 0.0
        silent_s = now_s - worker.heard_s
        if silent_s <= self._settings.stall_s:
            return 0.0
        usual_s = load.pace.busy_s / load.pace.steps
        return silent_s if silent_s > STALL_STEPS * usual_s else 0.0

    def counts(self) -> dict[str, int]:
        """Connected workers by role."""
        counts = {role.value: 0 for role in Role}
        for worker in self._workers.values():
            counts[worker.record.role.value] += worker.connected
        return counts

    def index_entries(self) -> dict[str, int]:
        """Index entries by worker id."""
        return {w.record.id: len(w.feed) for w in self._workers.values()}

    @property
    def index_bytes(self) -> int:
        """Memory of the index in use."""
        return self._index.used_bytes


def stands_still(worker: _Worker) -> bool:
    return worker.engine_silent_s >= ENGINE_SILENCE_S


def full_at(before: int, load: Load) -> int:
    """How many requests ran when others had to wait, in the newest report that says so; more if more have run since."""
    if load.waiting:
        return load.running
    return max(before, load.running) if before else 0
