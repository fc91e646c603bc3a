"""Sequenced cache events: hints for the router's view, never a matter of correctness."""

from array import array
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import count
from typing import NamedTuple

from twinflow.contracts.facts import fact
from twinflow.contracts.hashing import HASH_BYTES, pack_tokens

POSITION_BYTES = 4


class EventKind(IntEnum):
    """As in columns, on the wire too. Others may come from a newer peer."""

    BLOCK_STORED = 1
    BLOCK_REMOVED = 2
    CHECKPOINT_STORED = 3
    CHECKPOINT_REMOVED = 4


KNOWN_KINDS = bytes(EventKind)


class CacheEvent(NamedTuple):  # a prompt of 8k tokens makes hundreds: a tuple is made in a third of a dataclass's time
    """`prefix_hash` and `position` name the block boundary (blocks) or the checkpoint; `sequence` has no gaps per worker
    incarnation and starts at 1; `kind` is an `EventKind`, or a number that only a newer release knows."""

    sequence: int
    kind: int
    prefix_hash: bytes
    position: int


@fact(frozen=True, slots=True)
class EventColumns:
    """Many events side by side, n of them, numbered from `first` on (contents of a snapshot have no numbers). To make each of
    them by itself takes longer than anything that is done with them."""

    first: int
    kinds: bytes  # (n,)
    hashes: bytes  # (n, HASH_BYTES)
    positions: bytes  # (n,) little-endian uint32

    @classmethod
    def of(cls, events: Iterable[CacheEvent]) -> "EventColumns":
        """Of events in order without gaps."""
        if isinstance(events, EventColumns):
            return events
        columns = list(zip(*events, strict=True))
        if not columns:
            return cls(1, b"", b"", b"")
        sequences, kinds, hashes, positions = columns
        return cls(sequences[0], bytes(kinds), b"".join(hashes), pack_tokens(positions))

    def __len__(self) -> int:
        return len(self.kinds)

    def __iter__(self) -> Iterator[CacheEvent]:
        hashes = self.hashes
        each = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        return map(CacheEvent, count(self.first), self.kinds, each, array("I", self.positions))

    @property
    def unknown_kinds(self) -> bytes:
        """Of this release unknown ones, one for each event that has one."""
        return self.kinds.translate(None, KNOWN_KINDS)
