"""64-bit key → set of columns, in arrays: a hash table of bounded bytes that forgets its oldest entries.

Buckets of 8 rows; a key lives in one of two buckets, in the emptier one when it came. The table grows by splitting buckets in
order (linear hashing: Litwin 1980), a few at a time, so that no call ever rehashes all of it; the arrays are reserved at once
but their pages are only touched as it grows. A row is 8 B of key, 32 B of columns and 2 B of age: 42 B, and with at most 7/8 of
the rows in use 48 B an entry, everything included.

Ages are epochs: all entries stored (or stored again) while about 1/64 of the capacity was. When the table is full the oldest
epoch goes, all of it.
"""

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

WAYS = 8
WORDS = 4
COLUMNS = 64 * WORDS
ROW_BYTES = 8 + 2 + 8 * WORDS
FILL = 7 / 8  # of the rows, the most that is ever in use
GROW_AT = 1 / 2  # of the rows, until it cannot grow: buckets not yet split are up to half as full again as the average
FIRST_BUCKETS = 64
MAX_SPLITS = 8  # to make room in two full buckets
EPOCHS = 64  # that a full table spans
LAST_EPOCH = 0xFFFF
SWEEP_ROWS = 4096  # looked at per update while columns are being emptied

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_WAYS = np.arange(WAYS)


class KeyTable:
    """Not thread-safe. Keys are uniform (they are hashes). `len` = entries."""

    def __init__(self, max_bytes: int) -> None:
        """At least 64 buckets (21 KiB), whatever `max_bytes` says."""
        self._max_buckets = max(FIRST_BUCKETS, max_bytes // (WAYS * ROW_BYTES))
        rows = self._max_buckets * WAYS
        self._keys: U64 = np.zeros(rows, np.uint64)
        self._ages: NDArray[np.uint16] = np.zeros(rows, np.uint16)  # epoch; 0 = the row is free
        self._sets: U64 = np.zeros((rows, WORDS), np.uint64)
        self._buckets = FIRST_BUCKETS
        self._level = FIRST_BUCKETS  # buckets when this round of splits began
        self._entries = 0
        self._moves = 0  # times that rows may have changed their keys
        self._epoch = 1
        self._in_epoch = 0
        self._by_epoch: dict[int, int] = {}  # entries, oldest first
        self._per_column = np.zeros(COLUMNS, np.int64)
        self._emptying: dict[int, int] = {}  # column → rows still to be looked at
        self._sweep_at = 0

    def __len__(self) -> int:
        return self._entries

    @property
    def capacity(self) -> int:
        """Entries that it can hold in the end."""
        return int(self._max_buckets * WAYS * FILL)

    @property
    def used_bytes(self) -> int:
        """Of the rows in use so far: what the process really holds."""
        return self._buckets * WAYS * ROW_BYTES

    def count(self, column: int) -> int:
        return int(self._per_column[column])

    # ---- reads ----

    def lookup(self, keys: U64) -> U64:
        """(n, WORDS) columns as bits, zeros for unknown keys. No side effects."""
        rows = self._find(keys)
        found: U64 = self._sets[np.maximum(rows, 0)]
        found[rows < 0] = 0
        return found

    def may_have(self, key: int) -> bool:
        """False: certainly not. For one key, where `lookup` is about the arrays more than about the key."""
        return key in self._bucket(self._first_row(key & 0xFFFFFFFF)) or key in self._bucket(self._first_row(key >> 32))

    def columns(self, key: int) -> int:
        """The columns of one key, as bits of a number."""
        for half in (key & 0xFFFFFFFF, key >> 32):
            first = self._first_row(half)
            bucket = self._bucket(first)
            if key in bucket:  # a row that was freed has its last key still
                for row, held in enumerate(bucket, first):
                    if held == key and self._ages[row]:
                        return int.from_bytes(self._sets[row].tobytes(), "little")
        return 0

    def _first_row(self, half: int) -> int:
        """Of the bucket where a key may be, by its lower or its upper half."""
        at = half & (2 * self._level - 1)
        return (at if at < self._buckets else at - self._level) * WAYS

    def _bucket(self, first: int) -> list[int]:
        """Keys of the bucket that begins with this row."""
        keys: list[int] = self._keys[first : first + WAYS].tolist()
        return keys

    def _addresses(self, hashes: U64) -> I64:
        at = (hashes & np.uint64(2 * self._level - 1)).astype(np.int64)
        return at - (at >= self._buckets) * self._level

    def _both(self, keys: U64) -> I64:
        """(n, 2): the buckets where each key may be, by its lower and its upper half."""
        at = (keys.view(np.uint32).reshape(-1, 2) & np.uint32(2 * self._level - 1)).astype(np.int64)
        return at - (at >= self._buckets) * self._level

    def _find(self, keys: U64) -> I64:
        """Row of each key, -1 where there is none."""
        buckets = self._both(keys)
        at = np.flatnonzero(self._keys.reshape(-1, WAYS).take(buckets, axis=0) == keys[:, None, None])
        rows = buckets.reshape(-1)[at // WAYS] * WAYS + at % WAYS
        alive = self._ages[rows] != 0  # a row that was freed has its last key still
        found = np.full(len(keys), -1)
        found[at[alive] // (2 * WAYS)] = rows[alive]
        return found

    # ---- updates ----

    def add(self, keys: U64, columns: I64) -> None:
        """Puts columns[i] into the set of keys[i]; no pair twice. Makes the keys the youngest."""
        distinct, which = np.unique(keys, return_inverse=True)
        at = self._rows(distinct, self._find(distinct))[which]
        kept = at >= 0
        words, bits = columns[kept] >> 6, np.uint64(1) << (columns[kept] & 63).astype(np.uint64)
        fresh = (self._sets[at[kept], words] & bits) == 0
        np.bitwise_or.at(self._sets, (at[kept], words), bits)
        np.add.at(self._per_column, columns[kept][fresh], 1)
        self._sweep()

    def discard(self, keys: U64, columns: I64) -> None:
        """Takes columns[i] out of the set of keys[i]; no pair twice. Empty sets go."""
        rows = self._find(keys)
        kept = rows >= 0
        rows, columns = rows[kept], columns[kept]
        words, bits = columns >> 6, np.uint64(1) << (columns & 63).astype(np.uint64)
        had = (self._sets[rows, words] & bits) != 0
        np.bitwise_and.at(self._sets, (rows, words), ~bits)
        np.subtract.at(self._per_column, columns[had], 1)
        self._release(np.unique(rows[~self._sets[rows].any(axis=1)]))
        self._sweep()

    def change(self, column: int, keys: U64, stored: NDArray[np.bool_]) -> None:
        """`discard` where not `stored` and `add` where it is, of one column; no key twice."""
        sets, bit, rows = self._sets[:, column >> 6], np.uint64(1 << (column & 63)), self._find(keys)
        leave = rows[~stored]
        leave = leave[leave >= 0]
        if len(leave):
            had = sets[leave]
            sets[leave] = had & ~bit
            self._per_column[column] -= np.count_nonzero(had & bit)
            self._release(leave[~self._sets.take(leave, axis=0).any(axis=1)])
        if len(rows) > np.count_nonzero(~stored):
            come = self._rows(keys[stored], rows[stored])
            come = come[come >= 0]
            had = sets[come]
            sets[come] = had | bit
            self._per_column[column] += len(come) - np.count_nonzero(had & bit)
        self._sweep()

    def empty(self, column: int) -> None:
        """Starts to take the column out of every set; it must not be used until `emptied`. Updates do the work by and by."""
        self._per_column[column] = 0
        self._emptying[column] = self._buckets * WAYS

    def emptied(self, column: int) -> bool:
        return column not in self._emptying

    def finish_emptying(self) -> None:
        """Now, at the price of a walk over the whole table."""
        while self._emptying:
            self._sweep()

    # ---- growing and forgetting ----

    def _rows(self, keys: U64, rows: I64) -> I64:
        """Of distinct keys that were found in `rows`; new ones get some, and all are the youngest. -1: a full table has forgotten
        that one of a huge batch again."""
        new = np.flatnonzero(rows < 0)
        if len(new) < len(keys):
            self._touch(rows[rows >= 0])
        if not len(new):
            return rows
        moves = self._moves
        self._make_room(len(new))
        rows[new] = self._place(keys[new])
        return rows if self._moves == moves else self._find(keys)

    def _make_room(self, wanted: int) -> None:
        wanted = min(wanted, self.capacity)
        while self._entries + wanted > GROW_AT * self._buckets * WAYS and self._buckets < self._max_buckets:
            self._split()
        while self._entries + wanted > self.capacity:
            self._forget_oldest()

    def _split(self) -> None:
        """The next buckets share their entries with as many new ones at the end."""
        first, old = self._buckets - self._level, self._buckets
        count = min(max(FIRST_BUCKETS, self._level // 512), self._level - first, self._max_buckets - old)
        source = np.arange(first * WAYS, (first + count) * WAYS)
        keys, bucket = self._keys[source], source // WAYS
        by_first = self._addresses(keys & _LOW) == bucket
        self._buckets += count
        self._moves += 1
        hashes = np.where(by_first, keys & _LOW, keys >> _HALF)
        moving = (self._ages[source] != 0) & (self._addresses(hashes) != bucket)
        gone = source[moving]
        target = gone + (old - first) * WAYS
        self._keys[target], self._ages[target], self._sets[target] = keys[moving], self._ages[gone], self._sets[gone]
        self._ages[gone], self._sets[gone] = 0, 0
        if self._buckets == 2 * self._level:
            self._level = self._buckets
        if self._emptying:  # rows have moved: look at all of them again
            self._emptying = dict.fromkeys(self._emptying, self._buckets * WAYS)

    def _place(self, keys: U64) -> I64:
        """Gives each new key a row. Two buckets that are full lose the oldest of their entries, unless the next few splits
        help: about one entry in a hundred thousand goes before its time."""
        splits = MAX_SPLITS if self._buckets < self._max_buckets else 0
        rows, left = np.empty(len(keys), np.int64), np.arange(len(keys))
        while len(keys):
            buckets = self._both(keys)
            free = self._ages.reshape(-1, WAYS).take(buckets, axis=0) == 0
            room = np.bitwise_count(free.view(np.uint64))[:, :, 0]
            each, side = np.arange(len(keys)), (room[:, 1] > room[:, 0]).astype(np.int64)
            full = room[:, 0] + room[:, 1] == 0
            if full.any() and splits and self._buckets < self._max_buckets:
                self._split()
                splits -= 1
                continue
            if full.any():
                both = (buckets[full][:, :, None] * WAYS + _WAYS).reshape(-1, 2 * WAYS)
                self._free(np.unique(both[np.arange(len(both)), self._ages[both].argmin(axis=1)]))
                continue
            picked = buckets[each, side] * WAYS + free[each, side].argmax(axis=1)
            self._keys[picked] = keys  # of several that picked one row the last one has it
            has = self._keys[picked] == keys
            rows[left[has]] = taken = picked[has]
            self._entries += len(taken)
            self._join_epoch(taken)
            keys, left = keys[~has], left[~has]
        return rows

    def _touch(self, rows: I64) -> None:
        self._leave_epochs(rows)
        self._join_epoch(rows)

    def _join_epoch(self, rows: I64) -> None:
        self._ages[rows] = self._epoch
        self._by_epoch[self._epoch] = self._by_epoch.get(self._epoch, 0) + len(rows)
        self._in_epoch += len(rows)
        if self._in_epoch > self.capacity // EPOCHS:
            self._in_epoch = 0
            self._epoch += 1
            if self._epoch == LAST_EPOCH:
                self._renumber()

    def _leave_epochs(self, rows: I64) -> None:
        each = self._ages[rows]
        if len(each) and (each == each[0]).all():  # what came together
            ages, counts = each[:1], np.array([len(each)])
        else:
            ages, counts = np.unique(each, return_counts=True)
        for age, n in zip(ages.tolist(), counts.tolist(), strict=True):
            if age:
                self._by_epoch[age] -= n
                if not self._by_epoch[age]:
                    del self._by_epoch[age]

    def _forget_oldest(self) -> None:
        oldest = min(self._by_epoch)
        self._free(np.flatnonzero(self._ages[: self._buckets * WAYS] == oldest))

    def _free(self, rows: I64) -> None:
        sets = self._sets[rows]
        if sets.any():
            self._per_column -= columns_of(sets, self._emptying)
            self._sets[rows] = 0
        self._release(rows)

    def _release(self, rows: I64) -> None:
        """Rows whose sets are empty."""
        if len(rows):
            self._moves += 1
            self._leave_epochs(rows)
            self._ages[rows] = 0
            self._entries -= len(rows)

    def _renumber(self) -> None:
        """Ages start again from 1; what is older than half of all epochs counts as equally old."""
        shift = LAST_EPOCH // 2
        ages = self._ages[: self._buckets * WAYS]
        ages[ages > 0] = np.maximum(ages[ages > 0].astype(np.int64) - shift, 1)
        self._epoch -= shift
        values, counts = np.unique(ages[ages > 0], return_counts=True)
        self._by_epoch = dict(zip(values.tolist(), counts.tolist(), strict=True))

    def _sweep(self) -> None:
        """Some rows lose the columns that are being emptied."""
        if not self._emptying:
            return
        rows = self._buckets * WAYS
        self._sweep_at %= rows
        part = slice(self._sweep_at, min(self._sweep_at + max(SWEEP_ROWS, rows // 256), rows))
        mask = np.zeros(WORDS, np.uint64)
        for column in self._emptying:
            mask[column >> 6] |= np.uint64(1 << (column & 63))
        self._sets[part] &= ~mask
        vain = (self._ages[part] != 0) & ~self._sets[part].any(axis=1)
        self._free(np.flatnonzero(vain) + part.start)
        self._sweep_at = part.stop
        left = {c: n - (part.stop - part.start) for c, n in self._emptying.items()}
        self._emptying = {c: n for c, n in left.items() if n > 0}


def columns_of(sets: U64, but: "dict[int, int]") -> I64:
    """(COLUMNS,) how many of the (n, WORDS) sets hold each column; none for those in `but`."""
    bits = np.unpackbits(sets.view(np.uint8), axis=1, bitorder="little")
    counts: I64 = bits.sum(axis=0, dtype=np.int64)
    counts[list(but)] = 0
    return counts
