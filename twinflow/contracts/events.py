"""Sequenced cache events: hints for the router's view, never a matter of correctness."""

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
