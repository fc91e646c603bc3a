"""A registry in memory: the fake of tests, and the table behind `direct`. One event loop owns it."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from twinflow.contracts.workers import WorkerRecord
from twinflow.node.registry.base import Change, ChangeKind


class MemoryRegistry:
    def __init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._watchers: set[asyncio.Queue[Change]] = set()

    def records(self) -> Mapping[str, WorkerRecord]:
        return dict(self._records)

    async def watch(self) -> AsyncIterator[Change]:
        queue: asyncio.Queue[Change] = asyncio.Queue()
        for record in self._records.values():
            queue.put_nowait(Change(ChangeKind.JOINED, record))
        self._watchers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)

    def put(self, record: WorkerRecord) -> None:
        """Adds or updates; a new incarnation of a known id replaces it (LEFT, then JOINED)."""
        known = self._records.get(record.id)
        if known is not None and known.incarnation != record.incarnation:
            self.remove(known)
            known = None
        self._records[record.id] = record
        if known is None:
            self._tell(Change(ChangeKind.JOINED, record))
        elif known != record:
            self._tell(Change(ChangeKind.UPDATED, record))

    def remove(self, record: WorkerRecord) -> None:
        """Removes this incarnation; another one under the same id stays."""
        known = self._records.get(record.id)
        if known is not None and known.incarnation == record.incarnation:
            del self._records[record.id]
            self._tell(Change(ChangeKind.LEFT, known))

    def _tell(self, change: Change) -> None:
        for queue in self._watchers:
            queue.put_nowait(change)
