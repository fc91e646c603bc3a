"""Entries that are not true yet: what workers will hold once they have done what this router has just given to them.

The next request with the same prefix is priced as if it were there already. What the workers then really store comes with their
events; an expectation that did not come true ends by itself.

Keys that come together share one entry and leave together, by the list in which they came: finding the oldest one by walking
the table from its front would pass all that has left before.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.router.view.table import U64, WORDS

MAX_KEYS = 200_000  # about 110 B each
MAX_LISTED = 4 * MAX_KEYS  # times that keys are in lists, 8 B each: one that is expected again is in several
MIN_LEAVING = 256  # keys that may leave with every list that comes
MASK = 2**64 - 1

Entry = tuple[int, float, int]  # columns as bits, until (monotonic seconds), number of the list that it came with last


@dataclass(slots=True)
class _Came:
    """Keys that came together; `at` = the first one that has not left."""

    number: int
    keys: Sequence[int]
    until_s: float
    at: int = 0


class Expected:
    """Key → columns until a time. Bounded: the oldest goes first."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._entries: dict[int, Entry] = {}
        self._came: deque[_Came] = deque()
        self._listed = 0  # keys in `_came`
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, column: int, keys: Sequence[int], until_s: float, now_s: float) -> None:
        entries, bit = self._entries, 1 << column
        self._number += 1
        fresh: Entry = (bit, until_s, self._number)
        last_s = until_s
        if not entries.keys().isdisjoint(keys):
            merged: dict[Entry, Entry] = {}
            for key in keys:
                old = entries.get(key)
                if old is None:
                    entries[key] = fresh
                    continue
                if old not in merged:
                    columns = old[0] if old[1] > now_s else 0
                    merged[old] = (columns | bit, max(until_s, old[1]), self._number)
                    last_s = max(last_s, old[1])
                entries[key] = merged[old]
        else:
            entries.update(dict.fromkeys(keys, fresh))
        self._came.append(_Came(self._number, keys, last_s))
        self._listed += len(keys)
        self._forget_old(now_s, MIN_LEAVING + 2 * len(keys))

    def _forget_old(self, now_s: float, most: int) -> None:
        """What is over goes, `most` keys at a time: after a burst it is hundreds of thousands. What is too much goes at once."""
        while self._came:
            oldest = self._came[0]
            over = most if oldest.until_s <= now_s else 0
            allowed = max(over, len(self._entries) - self._max_keys, self._listed - MAX_LISTED)
            if allowed <= 0:
                break
            left = len(oldest.keys) - oldest.at
            going = min(left, allowed)
            most -= going
            for key in oldest.keys[oldest.at : oldest.at + going]:
                entry = self._entries.get(key)
                if entry is not None and entry[2] == oldest.number:
                    del self._entries[key]
            oldest.at += going
            self._listed -= going
            if going == left:
                self._came.popleft()

    def forget(self, column: int) -> None:
        kept = ~(1 << column)
        self._entries = {k: (c & kept, t, n) for k, (c, t, n) in self._entries.items() if c & kept}

    def columns(self, key: int, now_s: float) -> int:
        """Those expected at one key, as bits of a number."""
        entry = self._entries.get(key)
        return entry[0] if entry is not None and entry[1] > now_s else 0

    def has(self, key: int) -> bool:
        """Somebody is expected to hold it, or was until a moment ago."""
        return key in self._entries

    def merge(self, sets: U64, keys: U64, now_s: float) -> U64:
        """Adds the columns expected at `keys` (n,) to `sets` (n, WORDS), in place."""
        if not self._entries:
            return sets
        found = list(map(self._entries.get, keys.tolist()))
        if any(found):
            places: dict[int, list[int]] = {}
            for i, entry in enumerate(found):
                if entry is not None and entry[1] > now_s:
                    places.setdefault(entry[0], []).append(i)
            for columns, at in places.items():
                sets[at] |= words_of(columns)
        return sets


def words_of(columns: int) -> U64:
    """(WORDS,) of columns as bits."""
    return np.array([columns >> (64 * w) & MASK for w in range(WORDS)], np.uint64)
