"""The cache events of one worker incarnation, in order, into the index.

Events apply only in sequence. After a gap the index keeps what it has (a stale hint is still a hint), later events are held
back and a snapshot is asked for, which replaces everything.
"""

from collections.abc import Iterable

from services.router.view.index import HitIndex
from services.router.view.prompt import key_of, keys_of
from twinflow.contracts.events import CacheEvent, EventColumns, EventKind

MAX_PENDING_EVENTS = 100_000
MANY = 16  # events that are better taken together
_STORED, _REMOVED = EventKind.BLOCK_STORED, EventKind.BLOCK_REMOVED  # members are found slowly, and these are many


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
        events = EventColumns.of(events)
        if len(events) >= MANY and not had_gap and self._apply_all(events):
            return False
        for e in events:
            if e.sequence == self.sequence + 1:
                self._apply(e)
            elif e.sequence > self.sequence and len(self._pending) < MAX_PENDING_EVENTS:
                self._pending[e.sequence] = e
        self._drain_pending()
        return self.has_gap and not had_gap

    def _apply_all(self, events: EventColumns) -> bool:
        """Those of a long prompt, at once: the next ones in order, and about blocks of which none comes and goes."""
        if events.sequences != list(range(self.sequence + 1, self.sequence + 1 + len(events))):
            return False
        keys = keys_of(events.hashes).tolist()
        stored = [key for key, kind in zip(keys, events.kinds, strict=True) if kind is _STORED]
        removed = [key for key, kind in zip(keys, events.kinds, strict=True) if kind is _REMOVED]
        if len(stored) + len(removed) < len(events) or not set(stored).isdisjoint(removed):
            return False
        self.sequence = events.sequences[-1]
        if self.column is not None:
            self._index.store_all(self.column, stored)
            self._index.remove_all(self.column, removed)
        return True

    def replace(self, sequence: int, contents: Iterable[CacheEvent]) -> bool:
        """A snapshot that includes everything up to `sequence`. Returns True when a gap is still open after it."""
        if sequence < self.sequence:  # overtaken by events that came meanwhile
            return self.has_gap
        if len(self):
            self.close()
        if self.column is None:
            self.column = self._index.take_column()
        for e in contents:
            self._change(e)
        self.sequence = sequence
        self._pending = {n: e for n, e in self._pending.items() if n > sequence}
        self._drain_pending()
        return self.has_gap

    def _drain_pending(self) -> None:
        while (e := self._pending.pop(self.sequence + 1, None)) is not None:
            self._apply(e)

    def _apply(self, e: CacheEvent) -> None:
        self.sequence = e.sequence
        self._change(e)

    def _change(self, e: CacheEvent) -> None:
        if self.column is None:
            return
        index, key = self._index, key_of(e.prefix_hash)
        if e.kind is _STORED:
            index.store(self.column, key)
        elif e.kind is _REMOVED:
            index.remove(self.column, key)
        elif e.kind is EventKind.CHECKPOINT_STORED:
            index.store_checkpoint(self.column, key, e.position)
        else:
            index.remove_checkpoint(self.column, key)
