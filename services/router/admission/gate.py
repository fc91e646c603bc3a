"""The gate in the router's own process: limits of keys, then the queue while workers have no room, then a permit.

    enter ─▶ limits ─▶ room? ──────────────────────────────▶ permit ─▶ placed ─▶ leave
                         └─▶ queue ─▶ (room) its turn ─▶────┘

Limits are charged at the entry with what the request may use at most, and corrected when it leaves. The queue is looked at
whenever something is placed or leaves, and every `POLL_S` while anybody waits, since workers that get on tell only the view.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from services.router.admission.base import Ask, KeyFacts, Permit, Refusal, Shed, ShedReason, WaitedTooLong
from services.router.admission.drain import Drain
from services.router.admission.limits import KeyState
from services.router.admission.queue import Entry, FairQueue
from services.router.admission.room import FULL, Ahead, Room
from twinflow.contracts.errors import TwinflowError

log = logging.getLogger(__name__)

POLL_S = 0.02
LOOKING = 0.05  # of the time at most, while workers are full: looking at all of a large cluster takes milliseconds
MAX_RETRY_S = 60.0  # clients that are told more give up or try sooner
TOLD_EVERY_S = 60.0  # in the log, per key and reason


@dataclass(frozen=True, slots=True)
class GateSettings:
    max_requests: int = 1024  # generations let through and not over
    queue_requests: int = 1024
    queue_s: float = 30.0
    priority_s: float = 5.0
    retry_after_s: float = 1.0  # where nothing better is known


@dataclass(frozen=True, slots=True)
class GateEvents:
    """Whom the gate tells; for metrics."""

    waited: Callable[[float], None] = lambda seconds: None  # of requests that were let through
    shed: Callable[[str, ShedReason], None] = lambda key, why: None
    left: Callable[[str, int], None] = lambda key, tokens: None


@dataclass(slots=True, eq=False)
class _Held:
    """One request from its entry until it leaves."""

    id: int
    ask: Ask
    state: KeyState
    entered_s: float
    through: bool = False
    unplaced: int = 0
    place: asyncio.Future[None] | None = None  # while it waits
    entry: "Entry[_Held] | None" = None
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    def tokens_of(self, generations: int) -> int:
        """The share of so many of them in the prompt tokens."""
        return self.ask.prompt_tokens * generations // self.ask.generations


class LocalGate:
    """See `base.Gate`. Owned by one event loop."""

    def __init__(
        self,
        settings: GateSettings,
        look: Callable[[Ahead], Room],
        check_fits: Callable[[Ask], None],
        clock: Callable[[], float],
        events: GateEvents | None = None,
    ) -> None:
        """`look`: whether workers have room. `check_fits` raises for what fits no worker."""
        self._settings = settings
        self._look = look
        self._check_fits = check_fits
        self._clock = clock
        self._events = events or GateEvents()
        self._keys: dict[str, KeyState] = {}
        self._queue: FairQueue[_Held] = FairQueue(settings.priority_s)
        self._drain = Drain()
        self._held: dict[int, _Held] = {}
        self._ids = itertools.count(1)
        self._through = 0  # generations
        self._ahead = Ahead()
        self._poll: asyncio.TimerHandle | None = None
        self._full_until_s = float("-inf")  # workers were seen full; not looked at again before
        self._told: dict[tuple[str, ShedReason], float] = {}

    # ---- what there is ----

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        return self._queue.tokens

    @property
    def held(self) -> int:
        """Requests that have entered and not left."""
        return len(self._held)

    @property
    def idle(self) -> bool:
        return not len(self._queue) and not self._is_full()

    # ---- a request ----

    async def enter(self, ask: Ask) -> Permit:
        now = self._clock()
        state = self._state(ask.key, now)
        try:
            state.charge(ask, now, self._settings.retry_after_s)
        except Shed as e:
            self._note(e.refusal)
            raise
        held = _Held(next(self._ids), ask, state, now)
        self._held[held.id] = held
        try:
            if len(self._queue) or self._is_full():
                await self._wait(held)
            else:
                self._let_through(held)
        except BaseException as e:  # also a client that has left: whatever ends it here takes nothing
            self._drop(held, 0)
            if isinstance(e, Shed | WaitedTooLong):
                self._note(e.refusal)
            raise
        through_s = self._clock()
        waited_s = through_s - now
        self._events.waited(waited_s)
        return Permit(held.id, waited_s, state.quotas(through_s))

    def placed(self, permit_id: int) -> None:
        held = self._held.get(permit_id)
        if held is not None and held.unplaced:
            self._count_unplaced(held, held.unplaced - 1)
            self._pump()

    def leave(self, permit_id: int, tokens: int) -> None:
        held = self._held.get(permit_id)
        if held is not None:
            self._events.left(held.ask.key.name, tokens)
            self._drop(held, tokens)

    # ---- inside ----

    def _state(self, key: KeyFacts, now_s: float) -> KeyState:
        """Keys come from the operator's file, so there are few; of those that left nothing is kept that matters."""
        state = self._keys.get(key.name)
        if state is None:
            self._keys = {name: s for name, s in self._keys.items() if not s.is_fresh(now_s)}
            state = self._keys[key.name] = KeyState(key, now_s)
        state.follow(key, now_s)
        return state

    def _is_full(self) -> bool:
        started_s = self._clock()
        if self._through >= self._settings.max_requests or started_s < self._full_until_s:
            return True
        if self._look(self._ahead) is not FULL:
            return False
        ended_s = self._clock()
        self._full_until_s = ended_s + (ended_s - started_s) / LOOKING
        return True

    def _let_through(self, held: _Held) -> None:
        held.through = True
        self._through += held.ask.generations
        self._count_unplaced(held, held.ask.generations)

    def _count_unplaced(self, held: _Held, unplaced: int) -> None:
        before, ahead = held.unplaced, self._ahead
        if unplaced == before:
            return
        held.unplaced = unplaced
        tokens = held.tokens_of(unplaced) - held.tokens_of(before)
        self._ahead = Ahead(ahead.generations + unplaced - before, ahead.prompt_tokens + tokens)

    async def _wait(self, held: _Held) -> None:
        """Until it is let through. Raises Shed or WaitedTooLong instead."""
        ask, now = held.ask, held.entered_s
        self._check_fits(ask)
        loop = asyncio.get_running_loop()
        held.place = loop.create_future()
        held.entry = self._queue.push(ask.key.name, ask.key.weight, ask.tokens, ask.priority, now, held)
        self._drain.waits(now)
        limit_s, too_late = self._patience(held, now)
        held.timer = loop.call_later(limit_s, self._fail, held, too_late)
        self._make_room_in_line()
        self._keep_polling()
        await held.place

    def _make_room_in_line(self) -> None:
        if len(self._queue) > self._settings.queue_requests:
            last = self._queue.worst().what
            may = f"{self._settings.queue_requests} requests may wait here"
            told = f"no worker has room and the queue is full: {may}, key {last.ask.key.name} has most"
            self._fail(
                last, Shed(self._refusal(last, ShedReason.QUEUE_FULL, told, self._backlog_s(self._queue.tokens)))
            )

    def _patience(self, held: _Held, now_s: float) -> tuple[float, TwinflowError]:
        """How long it may wait, and what it then fails with. Raises Shed when the wait is known to be too long for its SLO."""
        settings, ask = self._settings, held.ask
        told = f"no worker had room for it within {settings.queue_s:g} s"
        retry_s = self._backlog_s(self._queue.tokens)
        late: TwinflowError = WaitedTooLong(self._refusal(held, ShedReason.DEADLINE, told, retry_s))
        slo_s = ask.key.slo_ttft_s
        if slo_s is None:
            return settings.queue_s, late
        assert held.entry is not None
        left_s = slo_s - ask.waited_s - ask.least_ttft_s
        wait_s = self._drain.seconds(self._queue.ahead_tokens(held.entry), now_s)
        if left_s < (wait_s or 0.0):
            ttft_s = ask.waited_s + ask.least_ttft_s + (wait_s or 0.0)
            told = f"its first token would come after {ttft_s:.2f} s, key {ask.key.name} allows {slo_s:g} s"
            raise Shed(self._refusal(held, ShedReason.SLO, told, ttft_s - slo_s))
        if left_s >= settings.queue_s:
            return settings.queue_s, late
        told = f"after a wait of {left_s:.2f} s its first token would come later than the {slo_s:g} s of key {ask.key.name}"
        return left_s, Shed(self._refusal(held, ShedReason.SLO, told, retry_s))

    def _refusal(self, held: _Held, why: ShedReason, told: str, retry_after_s: float) -> Refusal:
        retry_after_s = min(max(retry_after_s, self._settings.retry_after_s), MAX_RETRY_S)
        return Refusal(told, why, held.ask.key.name, retry_after_s, held.state.quotas(self._clock()))

    def _backlog_s(self, tokens: float) -> float:
        seconds = self._drain.seconds(tokens, self._clock())
        return self._settings.retry_after_s if seconds is None else min(max(seconds, 1.0), MAX_RETRY_S)

    def _fail(self, held: _Held, error: TwinflowError) -> None:
        self._leave_line(held)
        if held.place is not None and not held.place.done():
            held.place.set_exception(error)
            held.place.exception()  # seen, even if its task is cancelled before it looks

    def _leave_line(self, held: _Held) -> None:
        if held.timer is not None:
            held.timer.cancel()
        if held.entry is not None and self._queue.remove(held.entry) and not len(self._queue):
            self._drain.empty(self._clock())

    def _pump(self) -> None:
        """Lets go while there is room."""
        while len(self._queue) and not self._is_full():
            held = self._queue.pop().what
            now = self._clock()
            self._drain.let_go(held.ask.tokens, now)
            if not len(self._queue):
                self._drain.empty(now)
            if held.timer is not None:
                held.timer.cancel()
            self._let_through(held)
            assert held.place is not None
            if not held.place.done():
                held.place.set_result(None)

    def _keep_polling(self) -> None:
        if self._poll is None and len(self._queue):
            self._poll = asyncio.get_running_loop().call_later(POLL_S, self._on_poll)

    def _on_poll(self) -> None:
        self._poll = None
        self._pump()
        self._keep_polling()

    def _drop(self, held: _Held, tokens: int) -> None:
        """It takes nothing any more, and has used so many tokens."""
        del self._held[held.id]
        self._leave_line(held)
        held.state.correct(held.ask, tokens, self._clock())
        if held.through:
            self._through -= held.ask.generations
            self._count_unplaced(held, 0)
            if held.entry is not None:  # its turn was charged with it
                self._queue.used_less(held.ask.key.name, held.ask.tokens - tokens)
        self._pump()

    def _note(self, refusal: Refusal) -> None:
        key, why = refusal.key, refusal.why
        self._events.shed(key, why)
        now = self._clock()
        if now - self._told.get((key, why), -TOLD_EVERY_S) >= TOLD_EVERY_S:
            self._told[key, why] = now
            log.warning("requests of key %s are shed (%s): %s", key, why.value, refusal.message)
