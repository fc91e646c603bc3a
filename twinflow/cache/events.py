"""The log of cache events: what the tree publishes or drops, numbered without gaps, drained by the engine every step.

Hints for the router's view. Nothing in the cache reads them back.
"""

import itertools
from collections.abc import Iterable, Sequence

from twinflow.contracts.events import CacheEvent, EventKind


class EventLog:
    """Owned by the cache; the tree writes, the engine drains. Grows until drained."""

    def __init__(self) -> None:
        self.sequence = 0  # number of the last event; 0 before the first
        self._pending: list[CacheEvent] = []

    def emit(self, kind: EventKind, prefix_hash: bytes, position: int) -> None:
        self.sequence += 1
        self._pending.append(CacheEvent(self.sequence, kind, prefix_hash, position))

    def emit_each(self, kind: EventKind, prefix_hashes: Iterable[bytes], positions: Iterable[int]) -> None:
        """One event for each pair."""
        numbers = itertools.count(self.sequence + 1)
        new = list(map(CacheEvent, numbers, itertools.repeat(kind), prefix_hashes, positions))
        self.sequence += len(new)
        self._pending += new

    def drain(self) -> Sequence[CacheEvent]:
        """Events since the last call, in order."""
        drained, self._pending = self._pending, []
        return drained
