"""Who hangs below whom among the units of a pool: a forest in flat arrays, 16 bytes per unit."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar, cast

U = TypeVar("U", bound=int)


class Links(Generic[U]):
    """Numbers are stored plus one, 0 = none. Siblings are a doubly linked list, so that one of very many leaves in O(1)."""

    def __init__(self, size: int, unit: Callable[[int], U]) -> None:
        self._parent = array("I", bytes(4 * size))
        self._first = array("I", bytes(4 * size))
        self._after = array("I", bytes(4 * size))
        self._before = array("I", bytes(4 * size))
        self._unit = unit

    def parent(self, u: U) -> U | None:
        at = self._parent[u]
        return self._unit(at - 1) if at else None

    def only_parent(self, u: U) -> U | None:
        """The parent, if nothing else hangs below it."""
        at = self._parent[u]
        return self._unit(at - 1) if at and not (self._after[u] or self._before[u]) else None

    def has_children(self, u: U) -> bool:
        return self._first[u] != 0

    def children(self, u: U) -> Iterator[U]:
        at = self._first[u]
        while at:
            yield self._unit(at - 1)
            at = self._after[at - 1]

    def path(self, u: U) -> list[U]:
        """From the topmost ancestor down to `u`."""
        upwards, at = [int(u)], self._parent[u]
        while at:
            upwards.append(at - 1)
            at = self._parent[at - 1]
        return cast("list[U]", upwards[::-1])  # a NewType is an int: calling it for each takes most of the time

    def attach(self, u: U, parent: U | None) -> None:
        """Below `parent`, or at the top. The caller knows that `u` hangs nowhere and that nothing hangs below it."""
        if parent is None:
            return
        self._parent[u] = parent + 1
        self._after[u] = first = self._first[parent]
        if first:
            self._before[first - 1] = u + 1
        self._first[parent] = u + 1

    def attach_path(self, path: Sequence[U], parent: U | None) -> None:
        """The first below `parent`, or at the top, each of the others below the one before it."""
        parents, first, above = self._parent, self._first, path[0]
        self.attach(above, parent)
        for u in path[1:]:
            parents[u] = above + 1
            first[above] = u + 1
            above = u

    def detach(self, u: U) -> None:
        """The caller knows that nothing hangs below it."""
        before, after, parent = self._before[u], self._after[u], self._parent[u]
        if before:
            self._after[before - 1] = after
        elif parent:
            self._first[parent - 1] = after
        if after:
            self._before[after - 1] = before
        self._before[u] = self._after[u] = self._parent[u] = 0

    def detach_path(self, path: Sequence[U]) -> None:
        """Each is the only one below the next; the caller knows that nothing hangs below the first."""
        parents, first = self._parent, self._first
        for u in path[:-1]:
            parents[u] = 0
        for u in path[1:]:
            first[u] = 0
        self.detach(path[-1])

    def replace(self, source: U, target: U) -> None:
        """`target`, which hangs nowhere, takes the place of `source`, with all that hangs below it."""
        parent = self.parent(source)
        for child in self.children(source):
            self._parent[child] = target + 1
        self._first[target], self._first[source] = self._first[source], 0
        self.detach(source)
        self.attach(target, parent)
