"""What may go, in the order in which it goes: a queue over the units of a pool whose entries may be stale.

    offer ─▶ entries by (priority, rank) ─▶ pop: the first one that is ready and whose priority is still this
                  ▲ sweep: for each that goes another one is looked at again

A whole path of blocks mostly goes at once: each of them is offered when the one below has gone, and is the next one by then
(`pass_through`).
"""

import math
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from twinflow.cache.heap import Key, UnitHeap
from twinflow.cache.pool import Pool

U = TypeVar("U", bound=int)

LAST: Key = (math.inf, 0)


class Queue(Generic[U]):
    """Entries are checked when they come to the top, never searched for. A priority that has fallen counts once the unit is
    offered again, or when the sweep comes by."""

    def __init__(self, pool: Pool[U], key: Callable[[U], Key], ready: Callable[[U], bool]) -> None:
        self._heap = UnitHeap[U](pool.size)
        self._key = key
        self._ready = ready
        self._cursor = 0  # the place that was swept last

    def __contains__(self, u: U) -> bool:
        return u in self._heap

    def __len__(self) -> int:
        return len(self._heap)

    def check_order(self) -> None:
        """Raises AssertionError if the heap is none."""
        self._heap.check_order()

    def offer(self, u: U) -> None:
        """`u` may be evicted from now on, as far as is known, and its priority is this."""
        self._heap.put(u, self._key(u))

    def peek(self) -> tuple[float, U] | None:
        """(priority, unit) of the next one to go, or None. Sweeps once."""
        self.sweep(1)
        return self._next()

    def pop(self) -> U | None:
        """The next one to go, or None. Sweeps once."""
        found = self.peek()
        if found is None:
            return None
        self._heap.remove(found[1])
        return found[1]

    def pass_through(self, ahead: Iterable[tuple[U, Key]]) -> list[U]:
        """Those of `ahead`, in order, that would be the next to go as soon as they are offered with these keys. The first one
        that would not is offered, and ends it. No key changes meanwhile."""
        found = self._next()
        first = LAST if found is None else self._heap.key(found[1])
        passed = list[U]()
        for u, key in ahead:
            if key >= first:
                self._heap.put(u, key)
                break
            passed.append(u)
        return passed

    def sweep(self, times: int) -> None:
        """Looks again at so many entries, at most at all of them once: what a class of entries is worth can change while none of
        them is touched."""
        order = self._heap.order
        for _ in range(min(times, len(order))):
            self._cursor = (self._cursor + 1) % len(order)
            u = order[self._cursor]
            if self._ready(u) and (now := self._key(u)) < self._heap.key(u):
                self._heap.put(u, now)

    def _next(self) -> tuple[float, U] | None:
        """As `peek`, without a sweep."""
        heap = self._heap
        while heap.order:
            u = heap.order[0]
            if not self._ready(u):
                heap.remove(u)
                continue
            now = self._key(u)
            if now != heap.key(u):
                heap.put(u, now)
            if heap.order[0] == u:
                return now[0], u
        return None
