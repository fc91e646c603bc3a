"""The units of one kind (blocks, or slots) and who owns each of them.

A unit is in exactly one state, derived from four facts: references, I/O pins, whether the tree publishes it, and the last
launched step that may touch it. Every mutator changes one fact and settles the unit, so that counters cost O(changed).

Facts of all units are flat arrays; those that few units have at a time (pins, unfinished steps, queued copies) are dicts.
The pool knows neither tokens nor the tree: a listener is told when a unit becomes reclaimable or stops being so.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Generic, TypeVar

from twinflow.cache.base import PoolCounts

U = TypeVar("U", bound=int)


class UnitState(IntEnum):
    FREE = 0
    CACHED = 1  # published, no reference
    HELD = 2  # referenced, or released while a launched step may still touch it
    DOOMED = 3  # released, never published, and I/O may still write to it
    AWAY = 4  # beyond the boundary: its bytes belong to the other pool


FREE, CACHED, HELD, DOOMED, AWAY = map(int, UnitState)  # members of an enumeration are slow to compare


class StepClock:
    """Numbers of the forward passes, shared by both pools. Steps in (done, launched] are unfinished."""

    def __init__(self) -> None:
        self.launched = 0
        self.done = 0


class Pool(Generic[U]):
    """`unit` makes an id of this pool from an index (a NewType), so that ids of two pools cannot be mixed.

    Of at most `size` units the first `total` are there; the boundary of the arena moves that number.
    """

    def __init__(
        self, name: str, size: int, unit: Callable[[int], U], steps: StepClock, total: int | None = None
    ) -> None:
        self.name = name
        self.size = size
        self.total = size if total is None else total
        self.unit = unit
        self.state = bytearray([FREE]) * self.total + bytearray([AWAY]) * (size - self.total)  # of `UnitState`
        self.refs = array("I", bytes(4 * size))
        self.pins: dict[U, int] = {}  # only of pinned units
        self.published = bytearray(size)  # 0 or 1, as the other bytearrays
        self.used = array("q", bytes(8 * size))  # tick of the last use, for eviction
        self.reclaimable = bytearray(size)  # cached and without I/O: may be evicted
        self.reclaimable_count = 0
        self.listener: Callable[[U, bool], None] | None = None
        self._steps = steps
        self.lowest = 0  # no unit below is free
        self._count = [self.total, 0, 0, 0, size - self.total]  # by UnitState
        self._retired: dict[U, int] = {}  # step that must be done before the unit changes owner
        self._retiring: deque[tuple[int, U]] = deque()  # ascending steps
        self._fenced: dict[U, int] = {}  # step that must be done before anything off the compute stream may write here

    @property
    def free(self) -> int:
        return self._count[FREE]

    def counts(self) -> PoolCounts:
        free, cached, held, doomed, _ = self._count
        return PoolCounts(self.total, free, cached, held, doomed, len(self.pins))

    def is_free(self, u: U) -> bool:
        return self.state[u] == FREE

    def span(self, start: int, end: int) -> list[U]:
        """Units `start` to `end`, exclusive."""
        return [self.unit(i) for i in range(start, end)]

    def exclusive(self, u: U, *, references: int = 1) -> bool:
        """Whether the one holder of `u` may write into it, move it or take it over: one reference (a lease is one), no
        I/O, no unfinished step of an earlier owner. With `references` 0: whether nobody has it and it may be evicted."""
        return self.refs[u] == references and u not in self.pins and u not in self._retired

    def available(self, *, off_stream: bool) -> int:
        """Free units. `off_stream`: only those that no copy queued on the compute stream still reads or writes."""
        return self.free - (sum(self.is_free(u) for u in self._fenced) if off_stream else 0)

    def fenced_reclaimable(self) -> int:
        """Published units that could be evicted but not yet be written off the compute stream."""
        return sum(self.reclaimable[u] for u in self._fenced)

    def take(self, count: int, *, off_stream: bool = False) -> list[U]:
        """`count` free units with one reference each, lowest first. The caller has made sure that they are there."""
        taken: list[U] = []
        skipped: int | None = None
        at = self.lowest
        while len(taken) < count:
            at = self.state.find(FREE, at)
            if at < 0:
                raise ValueError(f"{count} {self.name} units were asked for, {len(taken)} are free")
            u = self.unit(at)
            if off_stream and u in self._fenced:
                skipped = at if skipped is None else skipped
            else:
                taken.append(u)
            at += 1
        self.lowest = at if skipped is None else skipped
        for u in taken:
            self.refs[u] = 1
            self.state[u] = HELD
        self._count[FREE] -= count
        self._count[HELD] += count
        return taken

    def ref(self, u: U, tick: int) -> None:
        self.refs[u] += 1
        self.used[u] = tick
        self._settle(u)

    def unref(self, u: U, tick: int, *, retire: bool = True) -> None:
        """Drops a reference. `retire`: steps launched so far may touch the unit, so it stays held until they are done."""
        if self.refs[u] < 1:
            raise ValueError(f"{self.name} {u} has no reference to drop")
        self.refs[u] -= 1
        self.used[u] = tick
        if retire and self._steps.launched > self._steps.done:
            self._retired[u] = self._steps.launched
            self._retiring.append((self._steps.launched, u))
        self._settle(u)

    def publish(self, u: U) -> None:
        self.published[u] = True
        self._settle(u)

    def publish_held(self, units: Sequence[U]) -> None:
        """`publish` of units that are held: they stay it."""
        for u in units:
            assert self.refs[u] and not self.published[u]
            self.published[u] = True

    def unpublish(self, u: U) -> None:
        self.published[u] = False
        self._settle(u)

    def discard(self, units: Sequence[U]) -> None:
        """`unpublish` of reclaimable units: they are free now. The listener is not told, it has no say in them any more."""
        for u in units:
            assert self.reclaimable[u]
            self.published[u] = self.reclaimable[u] = False
            self.state[u] = FREE
        self._count[CACHED] -= len(units)
        self._count[FREE] += len(units)
        self.reclaimable_count -= len(units)
        self.lowest = min(self.lowest, int(min(units)))

    def pin(self, u: U) -> None:
        if not 0 <= u < self.total or self.is_free(u):
            raise ValueError(f"{self.name} {u} is not in use and cannot be the source or destination of I/O")
        self.pins[u] = self.pins.get(u, 0) + 1
        if not self.refs[u]:  # else it is held, as before
            self._settle(u)

    def unpin(self, u: U) -> None:
        if u not in self.pins:
            raise ValueError(f"{self.name} {u} is not pinned by I/O")
        self.pins[u] -= 1
        if not self.pins[u]:
            del self.pins[u]
        if not self.refs[u]:
            self._settle(u)

    def fence(self, u: U) -> None:
        """A copy was queued on the compute stream that reads or writes `u`; it is done when the next step is done."""
        self._fenced[u] = self._steps.launched + 1

    def is_fenced(self, u: U) -> bool:
        """Whether a copy that is still queued reads or writes `u`."""
        return u in self._fenced

    def extend(self, total: int, fence: int) -> None:
        """Units up to `total` are there from now on, free; their bytes are fenced until step `fence` is done."""
        added, self.total = self.span(self.total, total), total
        for u in added:
            if fence > self._steps.done:
                self._fenced[u] = fence
            self._settle(u)

    def shrink(self, total: int) -> int:
        """Units from `total` on, all of them free, are gone. Returns the step behind which no queued copy touches any of
        their bytes; 0 = none does now."""
        gone, self.total, fence = self.span(total, self.total), total, 0
        for u in gone:
            assert self.is_free(u), f"{self.name} {u} is {UnitState(self.state[u]).name}"
            fence = max(fence, self._fenced.pop(u, 0))
            self._settle(u)
        return fence

    def end_step(self) -> None:
        """The clock's `done` has moved: units retired up to it change state."""
        while self._retiring and self._retiring[0][0] <= self._steps.done:
            step, u = self._retiring.popleft()
            if self._retired.get(u) == step:  # else a later release outlasts this one
                del self._retired[u]
                self._settle(u)
        if self._fenced:
            self._fenced = {u: step for u, step in self._fenced.items() if step > self._steps.done}

    def expected_state(self, u: U) -> int:
        """The `UnitState` that follows from the unit's facts."""
        if self.refs[u]:
            return HELD
        if u >= self.total:
            return AWAY
        if u in self.pins and not self.published[u]:
            return DOOMED
        if u in self._retired:
            return HELD
        return CACHED if self.published[u] else FREE

    def _settle(self, u: U) -> None:
        before, after = self.state[u], self.expected_state(u)
        if after != before:
            self.state[u] = after
            self._count[before] -= 1
            self._count[after] += 1
            if after == FREE and u < self.lowest:
                self.lowest = int(u)
        reclaimable = after == CACHED and u not in self.pins
        if reclaimable != self.reclaimable[u]:
            self.reclaimable[u] = reclaimable
            self.reclaimable_count += 1 if reclaimable else -1
            if self.listener is not None:
                self.listener(u, reclaimable)
