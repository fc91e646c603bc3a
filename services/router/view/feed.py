"""The cache events of one worker incarnation, in order, into the index.

Events apply only in sequence. After a gap the index keeps what it has (a stale hint is still a hint), later events are held
back and a snapshot is asked for, which replaces everything.
"""

from array import array
from collections.abc import Iterable

from services.router.view.index import HitIndex
from services.router.view.prompt import key_of, numbers_of
from twinflow.contracts.events import CacheEvent, EventColumns, EventKind

MAX_PENDING_EVENTS = 100_000
MANY = 112  # events that are worth arrays
_STORED, _REMOVED, _SAVED, _DROPPED = map(int, EventKind)  # members are found slowly, and these are many


class Feed:
    """`column` None: the index has no room for this worker, events only count."""

    def __init__(self, index: HitIndex) -> None:
        self.sequence = 0  # last event applied
        self._index = index
        self.column = index.take_column()
        self._pending: dict[int, CacheEvent] = {}

    def __len__(self) -> int:
        """Entries of this worker."""
        return 0 if self.column is None else self._index.count(self.column)

    @property
    def has_gap(self) -> bool:
        """True while events are missing, until a snapshot closes the gap."""
        return bool(self._pending)

    def close(self) -> None:
        """What the worker held is forgotten. The last call."""
        if self.column is not None:
            self._index.return_column(self.column)
            self.column = None

    def apply(self, events: Iterable[CacheEvent]) -> bool:
        """Takes events in any order; returns True when a gap has just opened: ask for a snapshot."""
        had_gap = self.has_gap
        if isinstance(events, EventColumns) and events.first == self.sequence + 1 and not had_gap:
            self._change_all(events)
            self.sequence += len(events)
            return False
        for e in events:
            if e.sequence == self.sequence + 1:
                self._apply(e)
            elif e.sequence > self.sequence and len(self._pending) < MAX_PENDING_EVENTS:
                self._pending[e.sequence] = e
        self._drain_pending()
        return self.has_gap and not had_gap

    def replace(self, sequence: int, contents: Iterable[CacheEvent]) -> bool:
        """A snapshot that includes everything up to `sequence`; its events' own numbers say nothing. Returns True when a gap is
        still open after it."""
        if sequence < self.sequence:  # overtaken by events that came meanwhile
            return self.has_gap
        if len(self):
            self.close()
        if self.column is None:
            self.column = self._index.take_column()
        self._change_all(EventColumns.of(contents))
        self.sequence = sequence
        self._pending = {n: e for n, e in self._pending.items() if n > sequence}
        self._drain_pending()
        return self.has_gap

    def _drain_pending(self) -> None:
        while (e := self._pending.pop(self.sequence + 1, None)) is not None:
            self._apply(e)

    def _apply(self, e: CacheEvent) -> None:
        self.sequence = e.sequence
        if self.column is not None:
            self._change(self.column, e.kind, key_of(e.prefix_hash), e.position)

    def _change_all(self, events: EventColumns) -> None:
        if self.column is None:
            return
        if len(events) >= MANY:
            self._index.change(self.column, events)
            return
        keys, positions = numbers_of(events.hashes), array("I", events.positions)
        for kind, key, position in zip(events.kinds, keys, positions, strict=True):
            self._change(self.column, kind, key, position)

    def _change(self, column: int, kind: int, key: int, position: int) -> None:
        """Kinds that only a newer release knows change nothing."""
        if kind == _STORED:
            self._index.store(column, key)
        elif kind == _REMOVED:
            self._index.remove(column, key)
        elif kind == _SAVED:
            self._index.store_checkpoint(column, key, position)
        elif kind == _DROPPED:
            self._index.remove_checkpoint(column, key)
