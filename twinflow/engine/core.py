"""The engine: one object, one thread, one `turn` at a time: commands in, at most one mixed step, one report out.

    turn(commands) = handle each command → admit waiting requests → launch a step, land the one before it → report

It waits for nothing but a step and never raises: an error belongs to the request that caused it and ends that request alone.
That all of a hand-off was read is told at once, without a step in that turn: its peer has to confirm it.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial

from twinflow.cache.arena import Arena
from twinflow.cache.base import Cache, PoolCounts
from twinflow.contracts.checkpoints import default_interval_tokens
from twinflow.contracts.errors import Cancelled, HandoffFailed, Internal, TooLong, TwinflowError, from_reason
from twinflow.contracts.events import EventColumns
from twinflow.contracts.requests import RequestStats
from twinflow.contracts.workers import Load
from twinflow.engine import base
from twinflow.engine.base import Continued, Done, Generated, Mode, Notice, Ready, Report
from twinflow.engine.config import EngineConfig
from twinflow.engine.control import answer
from twinflow.engine.guides import GuideReady, Guides
from twinflow.engine.limits import check_request
from twinflow.engine.load import load_of
from twinflow.engine.offers import Offers
from twinflow.engine.pulls import AllRead, Pulls
from twinflow.engine.runner import Runner
from twinflow.engine.sampling import Drawn
from twinflow.engine.sequence import Phase, Sequence
from twinflow.engine.steps import StepFailed, Steps
from twinflow.engine.waiting import Waiting, no_memory
from twinflow.models.base import HybridModel
from twinflow.transfer.base import GenerationClosed, GenerationOpened, PullFinished, TransferEvent
from twinflow.transfer.thread import TransferThread

log = logging.getLogger(__name__)

Inbound = base.Command | TransferEvent | GuideReady | AllRead


class Engine:
    """Owns every sequence of one worker. `transfer` is None for an aggregated worker without a transport."""

    def __init__(
        self, config: EngineConfig, model: HybridModel, arena: Arena, cache: Cache, transfer: TransferThread | None,
        ready: Ready, guides: Guides,
    ) -> None:  # fmt: skip
        self.config = config
        self.ready = ready
        self.model = model
        self.cache = cache
        self.fingerprint = model.layout.fingerprint()
        self.sequences: dict[str, Sequence] = {}
        self.waiting = Waiting(cache, config, self.sequences)
        self.stopping = False
        self.runner = Runner(model, arena, cache, config)
        self.guides = guides
        self.steps = Steps(self.runner, config, guides)
        self.running = self.steps.running
        verify = config.verify == "checksum"
        self.offers = Offers(arena, cache, self.fingerprint, transfer, verify)
        self.pulls = Pulls(arena, cache, self.fingerprint, transfer, verify, reserve=self.waiting.add)
        self._interval_tokens = config.checkpoint_interval_tokens or default_interval_tokens(model.layout)
        self._notices: list[Notice] = []
        self._told: tuple[Load, dict[str, PoolCounts]] | None = None  # by the newest report

    def close(self) -> None:
        """Destroys the transport; after it no posted read writes into the arena."""
        self.pulls.close()
        self.guides.close()

    @property
    def busy(self) -> bool:
        """There is something to do right now, or a step is running."""
        return bool(self.running or self.steps.in_flight or self.pulls.all_read)

    @property
    def idle(self) -> bool:
        return not self.sequences

    def turn(self, inbound: Iterable[Inbound]) -> Report | None:
        """One turn; None when nothing changed that anybody needs to know."""
        all_read, self.pulls.all_read = self.pulls.all_read, []
        for command in [*inbound, *all_read]:
            self._handle(command)
        stepped = False
        if not self.pulls.all_read:
            self._admit()
            self._grow()
            stepped = self._step()
        self.offers.open_for(self.sequences.values())
        events = EventColumns.of(self.cache.drain_events())  # hundreds go with a prompt: as columns they take a seventh
        notices, self._notices = tuple(self._notices), []
        told, self._told = self._told, (self._load(), self.cache.counts())
        quiet = not (stepped or events or notices) and self._told == told
        return None if quiet else Report(notices, events, *self._told, self.runner.work)

    # ---- commands ----

    def _handle(self, command: Inbound) -> None:
        name = getattr(command, "id", None)
        try:
            self._dispatch(command)
        except TwinflowError as error:
            if name in self.sequences:
                self._fail(self.sequences[name], error)
            elif isinstance(command, base.Submit):
                self._done(command.request.id, RequestStats(), error)
        except Exception as error:  # the edge of the loop: a defect ends one request, not the worker
            log.exception("command %s failed", type(command).__name__)
            if name in self.sequences:
                self._fail(self.sequences[name], Internal(f"{type(error).__name__}: {error}"))

    def _dispatch(self, command: Inbound) -> None:
        match command:
            case base.Submit():
                self._submit(command)
            case base.RunLocal(id):
                if sequence := self._in_phase(id, Phase.MATCHED):
                    self.waiting.add(sequence)
            case base.PullFrom(id, peer, want):
                if sequence := self._in_phase(id, Phase.MATCHED):
                    self.pulls.open(sequence, peer, want)
            case base.BlocksAnnounced():
                if (sequence := self.sequences.get(command.id)) and sequence.intake:
                    self._notices += self.pulls.announced(sequence, command)
            case base.FirstTokenArrived(id, sample):
                if sequence := self.sequences.get(id):
                    self._first_token(sequence, sample)
            case base.PrefillFinished():
                if (sequence := self.sequences.get(command.id)) and sequence.intake:
                    self._notices += self.pulls.finished(sequence, command)
            case base.Confirm(id):
                if sequence := self._in_phase(id, Phase.PULLING):
                    self._confirmed(sequence)
            case PullFinished():
                self._pull_finished(command)
            case AllRead(id):
                if sequence := self._in_phase(id, Phase.PULLING):
                    self._prepare(sequence)
            case GuideReady(id, sequence):
                if self._in_phase(id, Phase.COMPILING) is sequence:
                    sequence.guide = command.result()
                    self._begin(sequence)
            case GenerationOpened() | GenerationClosed():
                self._notices.append(command)
            case base.HandoffFailed(id, reason, message):
                if (sequence := self.sequences.get(id)) and sequence.intake:  # else: of a hand-off that is given up
                    self._lost(sequence, from_reason(reason, message))
            case base.PeerGone(key):
                self.pulls.forget(key)
            case base.Cancel(id) | base.EndLease(id):
                if sequence := self.sequences.get(id):
                    self._end(sequence, donate=True)
            case base.Shutdown():
                for each in list(self.sequences.values()):
                    self._end(each, donate=False)
                self._land_all()
                self.stopping = True
            case _:
                size = self.model.layout.block_tokens
                self._notices.append(answer(command, self.cache, size, self.sequences.values()))

    def _in_phase(self, id: str, phase: Phase) -> Sequence | None:
        sequence = self.sequences.get(id)
        return sequence if sequence and sequence.phase is phase else None

    def _submit(self, command: base.Submit) -> None:
        request = command.request
        if request.id in self.sequences:
            return
        check_request(request, self.ready, generates=command.mode is not Mode.OFFER)
        sequence = Sequence.submitted(command, self.model.layout.block_tokens)
        if request.sampling.grammar is not None:
            self.guides.prepare(sequence)  # goes on with GuideReady
        self.sequences[request.id] = sequence
        if sequence.phase is not Phase.COMPILING:
            self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        if sequence.mode is Mode.CLAIM:
            self._claim(sequence)
        else:
            self.waiting.add(sequence)

    def _claim(self, sequence: Sequence) -> None:
        """Holds what the cache has of the prompt and lets the front decide."""
        found = self.cache.match(sequence.chain)
        sequence.holding = self.cache.hold_prefix(sequence.chain)
        sequence.phase = Phase.MATCHED
        self._notices.append(sequence.matched(found))

    # ---- admission ----

    def _admit(self) -> None:
        """In order, all groups or none. The head waits for memory; nobody overtakes it."""
        if self.waiting and not self.busy:
            self.runner.settle()  # no step is coming that would release what the last copies fence
        while self._active() < self.config.max_running and (sequence := self.waiting.head):
            try:
                reserved = self.waiting.reserve(sequence)
            except TooLong as error:
                self._fail(sequence, error)
                continue
            if not reserved:
                if not self._active() and self.waiting.drop_claims():
                    continue
                break
            if sequence.intake:
                sequence.phase = Phase.PULLING
                self._proceed(sequence, partial(self.pulls.reserved, sequence))
            else:
                self._start(sequence)
        for sequence, waited_s in self.waiting.overdue():
            self._fail(sequence, no_memory(sequence, waited_s, self._load()))

    def _active(self) -> int:
        """Sequences that have, or will have without asking again, a row in the step's tables."""
        return self.steps.occupied_rows + sum(s.phase is Phase.PULLING for s in self.sequences.values())

    def _proceed(self, sequence: Sequence, go_on: Callable[[], list[Notice]]) -> None:
        """With its hand-off, which may fail by that."""
        try:
            self._notices += go_on()
        except TwinflowError as error:
            self._fail(sequence, error)

    def _start(self, sequence: Sequence) -> None:
        assert sequence.holding is not None
        sequence.phase = Phase.RUNNING
        self.steps.enter(sequence)
        sequence.plan_cuts(self._interval_tokens)
        if not sequence.preemptions:
            sequence.note_hits()
        if sequence.mode is Mode.OFFER:
            self._notices += self.offers.announce(sequence)

    def _grow(self) -> None:
        """Before a step every running sequence has memory for what it feeds. Who gets none waits for the steps in flight,
        whose end may free some; if none comes of that, the youngest yields."""
        size = self.model.layout.block_tokens
        short = [s for s in self.running.values() if s.holding and s.known_tokens > len(s.holding.blocks) * size]
        for sequence in short:
            while self.running.get(sequence.id) is sequence and sequence.holding and sequence.feedable_tokens:
                had = len(sequence.holding.blocks)
                if self.cache.extend(sequence.holding, sequence.needs_tokens(self.config.growth_tokens)):
                    self.steps.grow(sequence, had)
                    break
                if self.steps.in_flight:
                    self._land_all()
                    continue
                others = [s for s in self.running.values() if s.mode is not Mode.OFFER]  # a reader has those's blocks
                self._preempt(max(others, key=lambda s: s.started_s))

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue. Its state and blocks are published, so that it resumes without losing a token; it
        asks for more than it had, so that it only comes back to get on."""
        self.steps.leave(sequence, self._giving_back(sequence, donate=True))
        sequence.holding = sequence.intake = None
        sequence.preemptions += 1
        self.waiting.add(sequence, first=True)
        log.info("request %s yields its memory after %d tokens", sequence.id, len(sequence.chain))

    # ---- the step ----

    def _step(self) -> bool:
        """True when anything was launched or landed."""
        launched = False
        try:
            launched = self.steps.launch()
        except StepFailed as failure:
            self._step_failed(failure)
        if self.steps.must_land(launched):
            self._land()
            return True
        return launched

    def _land_all(self) -> None:
        while self.steps.in_flight:
            self._land()

    def _land(self) -> None:
        try:
            fed, drawn = self.steps.land()
        except StepFailed as failure:
            return self._step_failed(failure)
        for sequence in [s for s in fed if s.mode is Mode.OFFER and all(s is not one for one, _ in drawn)]:
            self._notices += self.offers.announce(sequence)  # of one that has ended the last blocks go with its end
        if going_on := [(s.id, one.token_id) for s, one in drawn if self._drawn(s, one)]:
            self._notices.append(Continued(*zip(*going_on, strict=True)))
        self.steps.ask()

    def _drawn(self, sequence: Sequence, drawn: Drawn) -> bool:
        """True: the request goes on, and of its token there is no more to say than what it is."""
        if (drawn.error or sequence.guide) and (problem := sequence.problem(drawn)):
            if drawn.broken and sequence.holding is not None:
                self.cache.withdraw(sequence.holding)  # else whoever has the same prefix fails, too
            self._fail(sequence, problem)
            return False
        finish, offered = sequence.take(drawn.token_id), sequence.mode is Mode.OFFER
        if finish is None and drawn.logprobs is None and not offered:
            return True
        sample = base.Sample(drawn.token_id, finish, drawn.logprobs)
        self._notices.append(Generated(sequence.id, (sample,), sequence.stats if offered else None))
        if offered:
            self.steps.leave(sequence, lambda: None)
            sequence.phase = Phase.LEASED
            self._notices.append(self.offers.complete(sequence))
        elif finish:
            self._end(sequence, donate=True)
        return False

    def _step_failed(self, failure: StepFailed) -> None:
        log.error("step of %d sequences failed", len(failure.sequences), exc_info=failure.__cause__)
        for sequence in failure.sequences:
            self._fail(sequence, Internal(f"step failed: {failure}"))
        if failure.fatal:
            log.error("the device is lost to this process; it ends")
            self._handle(base.Shutdown())

    # ---- hand-off, decode side ----

    def _first_token(self, sequence: Sequence, sample: base.Sample) -> None:
        if sample.finish:  # nothing more will be computed: no pull is needed
            self._end(sequence, donate=False)
        elif sequence.intake is None:
            if sequence.phase is Phase.MATCHED:  # forwarded before the front knew that the hand-off was lost
                sequence.force(sample.token_id)
        elif sequence.first is not None:
            raise HandoffFailed("the prefill worker sent two first tokens")
        else:
            sequence.first = sample
            sequence.chain.push(sample.token_id)

    def _pull_finished(self, event: PullFinished) -> None:
        """Also of sequences that are over: their memory is doomed until this moment."""
        sequence, actions = self.pulls.pull_finished(event)
        if sequence is not None and actions and sequence.id in self.sequences:
            self._proceed(sequence, partial(self.pulls.proceed, sequence, actions))

    def _prepare(self, sequence: Sequence) -> None:
        """While the confirmation is on its way, what joining takes and no received byte goes into."""
        if sequence.first is not None and sequence.row is None:
            self.steps.prepare(sequence, sequence.first.token_id)

    def _confirmed(self, sequence: Sequence) -> None:
        if sequence.first is None:
            raise HandoffFailed("the prefill worker confirmed without a first token")
        self.pulls.confirm(sequence)
        sequence.plan_cuts(self._interval_tokens)
        sequence.generated.append(sequence.first.token_id)
        sequence.phase = Phase.RUNNING
        self.steps.enter(sequence)

    # ---- ends ----

    def _giving_back(self, sequence: Sequence, *, donate: bool) -> Callable[[], None]:
        """What releases the sequence's present memory."""
        holding = sequence.holding
        return lambda: self.cache.release(holding, donate=donate) if holding is not None else None

    def _end(self, sequence: Sequence, *, donate: bool, error: TwinflowError | None = None) -> None:
        """The one way out: every structure forgets the sequence, its memory goes back, one `Done` is sent."""
        valid = donate and sequence.phase in (Phase.RUNNING, Phase.LEASED)
        sequence.failed = not valid
        self.waiting.remove(sequence)
        self.sequences.pop(sequence.id, None)
        self.pulls.cancel(sequence)
        self.steps.leave(sequence, self._giving_back(sequence, donate=valid))
        self._done(sequence.id, sequence.stats, error)

    def _fail(self, sequence: Sequence, error: TwinflowError) -> None:
        if isinstance(error, HandoffFailed):
            self._lost(sequence, error)
        else:
            self._end(sequence, donate=False, error=error)

    def _lost(self, sequence: Sequence, error: TwinflowError) -> None:
        """A hand-off failed. Unless it was confirmed already, nothing of it was used: the request starts over from what is
        held here, with a first token that the client has as a forced prefix. What reads may still write to is doomed."""
        if sequence.intake is None or sequence.phase is Phase.RUNNING or isinstance(error, Cancelled):
            self._end(sequence, donate=False, error=error)
            return
        self.waiting.remove(sequence)
        cause = self.pulls.cancel(sequence)
        self.steps.leave(sequence, self._giving_back(sequence, donate=False))
        first, sequence.first, sequence.intake, sequence.peer = sequence.first, None, None, None
        if first is not None:
            sequence.force(first.token_id, known=True)
        self._notices.append(base.HandoffLost(sequence.id, error.reason, error.message, cause))
        self._claim(sequence)

    def _done(self, id: str, stats: RequestStats, error: TwinflowError | None) -> None:
        reason, message, param = ("", "", None) if error is None else (error.reason, error.message, error.param)
        self._notices.append(Done(id, stats, reason, message, param))

    def _load(self) -> Load:
        return load_of(self.cache.counts(), self.model.layout, self.running.values(), self.waiting)
