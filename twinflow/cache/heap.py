"""A priority queue over the units of a pool in flat arrays: every unit at most once, 16 bytes each; 8 more for each in it."""

from array import array
from collections.abc import Iterator
from typing import Generic, TypeVar

U = TypeVar("U", bound=int)

Key = tuple[float, int]  # priority, rank among those of the same priority


class UnitHeap(Generic[U]):
    """Smallest key first. A binary heap with the place of each unit, so that a key can be changed where it is."""

    def __init__(self, size: int) -> None:
        self._priority = array("d", bytes(8 * size))
        self._rank = array("i", bytes(4 * size))
        self._place = array("I", bytes(4 * size))  # in `order`, plus one; 0 = not in the heap
        self.order: list[U] = []  # the heap; read-only to others

    def __len__(self) -> int:
        return len(self.order)

    def __contains__(self, u: U) -> bool:
        return self._place[u] != 0

    def __iter__(self) -> Iterator[U]:
        """In no order that means anything."""
        return iter(self.order)

    def at(self, place: int) -> U:
        """The unit at `place` of the heap, 0 being the first one to go."""
        return self.order[place]

    def key(self, u: U) -> Key:
        return self._priority[u], self._rank[u]

    def put(self, u: U, key: Key) -> None:
        """Adds the unit, or changes its key."""
        self._priority[u], self._rank[u] = key
        place = self._place[u] - 1
        if place < 0:
            self.order.append(u)
            self._up(len(self.order) - 1, u)
        else:
            self._down(self._up(place, u), u)

    def remove(self, u: U) -> None:
        place, last = self._place[u] - 1, self.order.pop()
        self._place[u] = 0
        if last != u:
            self._down(self._up(place, last), last)

    def check_order(self) -> None:
        """Raises AssertionError naming the first place that is wrong."""
        for place, u in enumerate(self):
            assert self._place[u] == place + 1, f"unit {u} is at {place}, not at {self._place[u] - 1}"
            assert not place or self.key(self.at((place - 1) >> 1)) <= self.key(u), (
                f"unit {u} at {place} is out of order"
            )
        assert len(self) == sum(p > 0 for p in self._place), "units out of the heap have a place in it"

    def _up(self, place: int, u: U) -> int:
        """Moves `u` from `place` towards the top as far as it belongs; returns where it is now."""
        order, places, priority = self.order, self._place, self._priority
        mine = priority[u]
        while place:
            above = (place - 1) >> 1
            other = order[above]
            if (theirs := priority[other]) <= mine and (theirs < mine or self._rank[other] <= self._rank[u]):
                break
            order[place] = other
            places[other] = place + 1
            place = above
        order[place] = u
        places[u] = place + 1
        return place

    def _down(self, place: int, u: U) -> None:
        """The same towards the bottom."""
        order, places, priority, rank = self.order, self._place, self._priority, self._rank
        mine, last = priority[u], len(order) - 1
        while (below := 2 * place + 1) <= last:
            other = order[below]
            found = priority[other]
            if below < last:
                right = order[below + 1]
                if (theirs := priority[right]) <= found and (theirs < found or rank[right] < rank[other]):
                    below, other, found = below + 1, right, theirs
            if mine <= found and (mine < found or rank[u] <= rank[other]):
                break
            order[place] = other
            places[other] = place + 1
            place = below
        order[place] = u
        places[u] = place + 1
