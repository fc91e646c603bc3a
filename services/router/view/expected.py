"""Entries that are not true yet: what workers will hold once they have done what this router has just given to them.

The next request with the same prefix is priced as if it were there already. What the workers then really store comes with their
events; an expectation that did not come true ends by itself.
"""

from collections.abc import Sequence

import numpy as np

from services.router.view.table import U64, WORDS

MAX_KEYS = 200_000  # about 150 B each
MASK = 2**64 - 1


class Expected:
    """Key → columns until a time. Bounded: the oldest goes first."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._entries: dict[int, tuple[int, float]] = {}  # key → (columns as bits, monotonic seconds)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, column: int, keys: Sequence[int], until_s: float, now_s: float) -> None:
        entries, bit = self._entries, 1 << column
        for key in keys:
            columns, last_s = entries.pop(key, (0, 0.0))
            columns = columns if last_s > now_s else 0
            entries[key] = (columns | bit, max(until_s, last_s))
        while entries:
            oldest = next(iter(entries))
            if len(entries) <= self._max_keys and entries[oldest][1] > now_s:
                break
            del entries[oldest]

    def forget(self, column: int) -> None:
        kept = ~(1 << column)
        self._entries = {k: (c & kept, t) for k, (c, t) in self._entries.items() if c & kept}

    def merge(self, sets: U64, keys: U64, now_s: float) -> U64:
        """Adds the columns expected at `keys` (n,) to `sets` (n, WORDS), in place."""
        entries = self._entries
        if entries:
            for i, key in enumerate(keys.tolist()):
                found = entries.get(key)
                if found is not None and found[1] > now_s:
                    sets[i] |= words_of(found[0])
        return sets


def words_of(columns: int) -> U64:
    """(WORDS,) of columns as bits."""
    return np.array([columns >> (64 * w) & MASK for w in range(WORDS)], np.uint64)
