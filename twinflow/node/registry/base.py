"""The contract of every registry backend: a table of worker records and a feed of its changes."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from twinflow.contracts.workers import WorkerRecord


class ChangeKind(Enum):
    JOINED = "joined"
    UPDATED = "updated"  # same incarnation; load, draining or addresses differ
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Change:
    """For LEFT, `record` is the last one known. A restart (new incarnation) is LEFT then JOINED."""

    kind: ChangeKind
    record: WorkerRecord


class Registry(Protocol):
    def records(self) -> Mapping[str, WorkerRecord]:
        """Live workers by id, now. No side effects; a copy that the caller may keep."""
        ...

    def watch(self) -> AsyncIterator[Change]:
        """Every live worker as JOINED, then changes in order, for ever. Each watcher sees everything."""
        ...
