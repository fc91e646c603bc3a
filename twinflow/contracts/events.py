"""Sequenced cache events: hints for the router's view, never a matter of correctness."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class EventKind(Enum):
    BLOCK_STORED = "block_stored"
    BLOCK_REMOVED = "block_removed"
    CHECKPOINT_STORED = "checkpoint_stored"
    CHECKPOINT_REMOVED = "checkpoint_removed"


class CacheEvent(NamedTuple):  # a prompt of 8k tokens makes hundreds: a tuple is made in a third of a dataclass's time
    """`prefix_hash` and `position` name the block boundary (blocks) or the checkpoint; `sequence` has no gaps per worker
    incarnation and starts at 1."""

    sequence: int
    kind: EventKind
    prefix_hash: bytes
    position: int


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Many events side by side. To make each of them by itself takes longer than anything that is done with them."""

    sequences: list[int]
    kinds: list[EventKind]
    hashes: list[bytes]
    positions: list[int]

    @classmethod
    def of(cls, events: Iterable[CacheEvent]) -> "EventColumns":
        if isinstance(events, EventColumns):
            return events
        columns = [list(column) for column in zip(*events, strict=True)]
        return cls(*columns) if columns else cls([], [], [], [])

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[CacheEvent]:
        return map(CacheEvent, self.sequences, self.kinds, self.hashes, self.positions)
