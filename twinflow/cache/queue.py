"""What may go, in the order in which it goes: a queue over the units of a pool whose entries may be stale.

    offer ─▶ entries by (priority, rank) ─▶ pop: the first one that is ready and whose priority is still this
                  ▲ sweep: one entry looked at again with each pop

A whole path of blocks mostly goes at once: each of them is offered when the one below has gone, and is popped as the next one.
`pass_through` does that for all of them together, and leaves behind what one call for each would: the entries in the same
places, by which the sweep goes, and the same priorities.
"""

import math
from collections.abc import Callable, Iterable, Iterator
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
        self._sweep()
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

    def pop(self) -> U | None:
        """The next one to go, or None. Sweeps once."""
        found = self.peek()
        if found is None:
            return None
        self._heap.remove(found[1])
        return found[1]

    def pass_through(self, ahead: Iterable[tuple[U, Key]], sweeps: int) -> list[U]:
        """Offers each unit with its key and pops it, sweeping so many times, up to the first one that is not the next to go
        then: that one stays, unswept. Returns those that were popped. The units are not in the queue yet, each comes after
        the one before it, and no key changes meanwhile."""
        heap, passed, known, still, rest = self._heap, list[U](), set[U](), False, iter(ahead)
        for u, key in rest:
            heap.put(u, key)
            if heap.order[0] != u or (fallen := self._fallen(sweeps, key, known)) is None:
                break
            passed.append(u)
            moved = self._swept(sweeps, fallen)
            stays = self._pass_over(rest, sweeps, known, passed) if still and not moved else None
            still = heap.remove(u)
            if stays is not None:
                heap.put(*stays)
                break
        return passed

    def _pass_over(
        self, rest: Iterator[tuple[U, Key]], sweeps: int, known: set[U], passed: list[U]
    ) -> tuple[U, Key] | None:
        """`pass_through` while the one on top can be replaced by the next without moving any other: so it is left there for
        all of them. Ends when that holds no longer. Returns the one that stays, if there is one; it is not put in."""
        size, swept, below = len(self._heap), 0, self._heap.second_key()
        for u, key in rest:
            if below is not None and key >= below:
                return u, key
            fallen = self._fallen(sweeps, key, known) if swept < size else []  # once all were swept here, none falls
            if fallen is None:
                return u, key
            passed.append(u)
            if self._swept(sweeps, fallen):
                return None
            swept += sweeps
        return None

    def settled(self) -> bool:
        """Whether the next sweep changes nothing."""
        return self._fallen(1, LAST, set()) == []

    def skip(self) -> None:
        """Takes the next sweep as done."""
        self._swept(1, [])

    def _sweep(self) -> None:
        """Looks again at one entry: what a class of entries is worth can change while none of them is touched."""
        order = self._heap.order
        if not order:
            return
        self._cursor = (self._cursor + 1) % len(order)
        u = order[self._cursor]
        if self._ready(u) and (now := self._key(u)) < self._heap.key(u):
            self._heap.lower(self._cursor, now)

    def _fallen(self, sweeps: int, first: Key, known: set[U]) -> list[tuple[int, Key]] | None:
        """(place, key of now) of what the next sweeps will find to be worth less; None if any of it comes before `first`,
        the key of the one on top, by now. That one and those `known` are as they are here; adds to these whom it finds so."""
        order, size, fallen = self._heap.order, len(self._heap.order), list[tuple[int, Key]]()
        for place in range(self._cursor + 1, self._cursor + 1 + min(sweeps, size)):
            if place >= size:
                place %= size
            u = order[place]
            if place and u not in known:
                if self._ready(u) and (now := self._key(u)) < self._heap.key(u):
                    if now < first:
                        return None
                    fallen.append((place, now))
                else:
                    known.add(u)
        return fallen

    def _swept(self, sweeps: int, fallen: Iterable[tuple[int, Key]]) -> bool:
        """So many sweeps have found these. Whether, by it, the entries may move otherwise than before when the one on top is
        replaced."""
        heap = self._heap
        if heap.order:
            self._cursor = (self._cursor + sweeps) % len(heap.order)
        moved = False
        for place, key in fallen:
            moved = not heap.lower(place, key) or heap.is_by_the_way(place) or moved
        return moved
