"""Which unit has which name: a hash table in flat arrays, 24 to 28 bytes per unit whatever is in it.

Names are chain hashes (`contracts/hashing.py`): 16 bytes that stand for all tokens up to a position and for the root they
hang from. Their first bytes are as good as random, so they are the hash.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from twinflow.contracts.hashing import HASH_BYTES

U = TypeVar("U", bound=int)


class NameTable(Generic[U]):
    """Chained: `_heads[bucket]` is the first unit, `_next[unit]` the one behind it; both are stored plus one, 0 = none."""

    def __init__(self, size: int, unit: Callable[[int], U]) -> None:
        buckets = 1 << max(3, (size - 1).bit_length())
        self._mask = buckets - 1
        self._heads = array("I", bytes(4 * buckets))
        self._next = array("I", bytes(4 * size))
        self._names = bytearray(HASH_BYTES * size)
        self._words = memoryview(self._names).cast("Q")  # two of each name, the first of which is its hash
        self._unit = unit
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, name: bytes) -> U | None:
        at = self._heads[int.from_bytes(name[:8], sys.byteorder) & self._mask]
        while at:
            end = HASH_BYTES * at
            if self._names[end - HASH_BYTES : end] == name:
                return self._unit(at - 1)
            at = self._next[at - 1]
        return None

    def name(self, unit: U) -> bytes:
        """Of a unit that was added, also after it was removed."""
        return bytes(self._names[HASH_BYTES * unit : HASH_BYTES * (unit + 1)])

    def add(self, name: bytes, unit: U) -> None:
        """The caller knows that neither is in the table."""
        self.add_each((name,), (unit,))

    def add_each(self, names: Sequence[bytes], units: Sequence[U]) -> None:
        """One name for each unit; the caller knows that none of them is in the table."""
        heads, after, words, mask = self._heads, self._next, self._words, self._mask
        for name, unit in zip(names, units, strict=True):
            self._names[HASH_BYTES * unit : HASH_BYTES * unit + HASH_BYTES] = name
            bucket = words[2 * unit] & mask
            after[unit] = heads[bucket]
            heads[bucket] = unit + 1
        self._count += len(units)

    def remove(self, unit: U) -> None:
        """Raises KeyError for a unit that is not in the table."""
        self.remove_all((unit,))

    def remove_all(self, units: Sequence[U]) -> list[bytes]:
        """Returns their names. Raises KeyError for a unit that is not in the table."""
        heads, after, words, mask = self._heads, self._next, self._words, self._mask
        names, step = self._names, HASH_BYTES
        removed = [bytes(names[step * unit : step * unit + step]) for unit in units]
        for unit in units:
            bucket = words[2 * unit] & mask
            at = heads[bucket]
            if at == unit + 1:
                heads[bucket] = after[unit]
            else:
                while at and after[at - 1] != unit + 1:
                    at = after[at - 1]
                if not at:
                    raise KeyError(unit)
                after[at - 1] = after[unit]
        self._count -= len(removed)
        return removed
