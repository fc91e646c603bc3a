"""Who holds what: one index of block and checkpoint hashes for all workers, and what it says of a prompt.

A hash is cut to 64 bits and looked up as it is; layouts share the index, since the fingerprint is part of every hash. Two hashes
may be cut to the same key: then a worker seems to hold a block that it does not, which costs one wrong guess, because the worker
matches its own cache by whole hashes. The same holds for whatever is stale here: events are hints.

Writes gather, and readers see what has gathered: the table's work is by the array, which a few keys are not worth. Every worker
incarnation has a column; a column that is given back is used again once it is in no set any more.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from services.router.view.expected import Expected, words_of
from services.router.view.prompt import FEW_BLOCKS, KEY_BYTES, PromptKeys, ReplyKeys
from services.router.view.table import COLUMNS, U64, WORDS, KeyTable
from twinflow.contracts.checkpoints import INTERVAL_STATE_SHARE, checkpoint_positions
from twinflow.contracts.events import EventColumns, EventKind
from twinflow.contracts.facts import fact
from twinflow.contracts.hashing import HASH_BYTES
from twinflow.contracts.workers import WorkerRecord

CHECKPOINT = 0x5DEECE66D51A7E57  # a checkpoint's key: its hash's, with these bits turned
FIRST_BLOCKS, MORE_BLOCKS = 64, 1024  # looked up at a time: many prompts end soon
FEW_COLUMNS = 8  # of those that hold a prompt that is looked up block by block
MAX_GATHERED = 1024  # keys written and not in the table yet
MAX_CHANGED = 4096  # keys put into the table at a time: what a huge message needs of memory beside it
MAX_TAILS = 256  # mid-block positions whose hashes are tried per prompt, about 1 µs each
MAX_POSITION = 1 << 22  # of mid-block checkpoints that are remembered


_NOTHING = (0, 0)


@fact(frozen=True, slots=True)
class Holdings:
    """What each column holds of one prompt, in tokens. `points`: block boundaries with a checkpoint within the reach."""

    reach: NDArray[np.int64]  # (columns,) of attention
    deepest: NDArray[np.int64]  # (columns,) checkpoint from which the prompt can be resumed, 0 = none
    points: NDArray[np.uint8]  # (blocks, columns)
    block_tokens: int

    def checkpoints(self, column: int) -> tuple[int, ...]:
        """Ascending: those at block boundaries, and the deepest one if it is inside a block."""
        at = ((np.flatnonzero(self.points[:, column]) + 1) * self.block_tokens).tolist()
        deepest = int(self.deepest[column])
        return tuple([*at, deepest] if deepest and deepest not in at else at)


class HitIndex:
    """Owned by the view. `now_s` of calls is monotonic."""

    def __init__(self, max_bytes: int) -> None:
        self._table = KeyTable(max_bytes)
        self.expected = Expected()
        self._free = list(range(COLUMNS - 1, -1, -1))
        self._returned: list[int] = []
        self._words = 1  # of the sets, that hold columns in use
        self._gathered: dict[int, tuple[int, int]] = {}  # key → columns stored and removed, as bits
        self._positions = np.zeros(0, bool)  # at which a mid-block checkpoint was ever stored
        self._first_position = MAX_POSITION

    def __len__(self) -> int:
        self._flush()
        return len(self._table)

    @property
    def used_bytes(self) -> int:
        return self._table.used_bytes

    # ---- columns ----

    def take_column(self) -> int | None:
        """None when there are more workers than columns: what the last ones hold is not known then."""
        if not self._free and self._returned:
            self._table.finish_emptying()
        done = [c for c in self._returned if self._table.emptied(c)]
        self._returned = [c for c in self._returned if c not in done]
        self._free += done
        if not self._free:
            return None
        column = self._free.pop()
        self._words = max(self._words, column // 64 + 1)
        return column

    def return_column(self, column: int) -> None:
        self.expected.forget(column)
        if not self.count(column):
            self._free.append(column)
            return
        self._table.empty(column)
        self._returned.append(column)

    def count(self, column: int) -> int:
        """Entries that a column is in."""
        self._flush()
        return self._table.count(column)

    # ---- writes ----

    def store(self, column: int, key: int) -> None:
        self._gather(key, column, True)

    def change(self, column: int, events: EventColumns) -> None:
        """Many at once; of several about one entry the last counts."""
        kinds, positions = np.frombuffer(events.kinds, np.uint8), np.frombuffer(events.positions, "<u4")
        keys = np.frombuffer(events.hashes, "<u8")[:: HASH_BYTES // KEY_BYTES].astype(np.uint64)
        if events.unknown_kinds:
            known = np.isin(kinds, list(EventKind))
            kinds, positions, keys = kinds[known], positions[known], keys[known]
        saved = kinds == EventKind.CHECKPOINT_STORED
        for position in set(positions[saved].tolist()):
            self._remember(position)
        keys[saved | (kinds == EventKind.CHECKPOINT_REMOVED)] ^= np.uint64(CHECKPOINT)
        stored = saved | (kinds == EventKind.BLOCK_STORED)
        ordered = np.sort(keys)
        if (ordered[1:] == ordered[:-1]).any():
            last = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
            keys, stored = keys[last], stored[last]
        if self._gathered and not self._gathered.keys().isdisjoint(keys.tolist()):
            self._flush()
        for at in range(0, len(keys), MAX_CHANGED):
            self._table.change(column, keys[at : at + MAX_CHANGED], stored[at : at + MAX_CHANGED])

    def store_checkpoint(self, column: int, key: int, position: int) -> None:
        self._gather(key ^ CHECKPOINT, column, True)
        self._remember(position)

    def expect_reply(self, column: int, reply: ReplyKeys, until_s: float, now_s: float) -> None:
        self.expected.add(column, [*reply.blocks, *(key ^ CHECKPOINT for key in reply.states.values())], until_s, now_s)
        for position in reply.states:
            self._remember(position)

    def _remember(self, position: int) -> None:
        """There may be a checkpoint inside a block there, of whatever prompt."""
        if position < MAX_POSITION:
            if position >= len(self._positions):
                self._positions = np.append(self._positions, np.zeros(position + 1, bool))
            self._positions[position] = True
            self._first_position = min(self._first_position, position)

    def remove(self, column: int, key: int) -> None:
        self._gather(key, column, False)

    def remove_checkpoint(self, column: int, key: int) -> None:
        self._gather(key ^ CHECKPOINT, column, False)

    def _gather(self, key: int, column: int, stored: bool) -> None:
        there, gone = self._gathered.get(key, (0, 0))
        bit = 1 << column
        self._gathered[key] = (there | bit, gone & ~bit) if stored else (there & ~bit, gone | bit)
        if len(self._gathered) >= MAX_GATHERED:
            self._flush()

    def _flush(self) -> None:
        if not self._gathered:
            return
        gathered, self._gathered = self._gathered, {}
        alike: dict[tuple[int, int], list[int]] = {}  # few columns, many keys
        for key, sets in gathered.items():
            if sets in alike:
                alike[sets].append(key)
            else:
                alike[sets] = [key]
        for side, change in ((1, self._table.discard), (0, self._table.add)):
            parts = [(keys, column) for sets, keys in alike.items() for column in _columns(sets[side])]
            if parts:
                columns = [np.full(len(keys), column, np.int64) for keys, column in parts]
                change(np.concatenate([np.array(keys, np.uint64) for keys, _ in parts]), np.concatenate(columns))

    # ---- reads ----

    def holdings(self, record: WorkerRecord, prompt: PromptKeys, now_s: float) -> Holdings:
        """Of all columns; they mean something for workers of this record's layout."""
        found = self._few(record, prompt, now_s) or self._many(record, prompt, now_s)
        return self._with_tails(found, record, prompt, now_s)

    def _few(self, record: WorkerRecord, prompt: PromptKeys, now_s: float) -> Holdings | None:
        """Of a short prompt that few columns hold, block by block; None for others, which are worth arrays."""
        numbers, block_tokens = prompt.block_numbers(record), record.block_tokens
        if len(numbers) > FEW_BLOCKS:
            return None
        alive = -1
        held: list[int] = []
        for key in numbers:
            alive &= self._columns_of(key, now_s)
            if not alive:
                break
            held.append(alive)
        if held and held[0].bit_count() > FEW_COLUMNS:
            return None
        shape = 64 * self._words
        found = Holdings(
            np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros((len(held), shape), np.uint8), block_tokens
        )
        usable = (prompt.tokens - 1) // block_tokens
        for i, (key, columns) in enumerate(zip(numbers, held, strict=False)):
            saved = self._columns_of(key ^ CHECKPOINT, now_s) if i < usable else 0
            for column in _columns(columns):
                found.reach[column] = (i + 1) * block_tokens
                if saved >> column & 1:
                    found.deepest[column] = (i + 1) * block_tokens
                    found.points[i, column] = 1
        return found

    def _columns_of(self, key: int, now_s: float) -> int:
        stored, removed = self._gathered.get(key, _NOTHING)
        return self._table.columns(key) & ~removed | stored | self.expected.columns(key, now_s)

    def _many(self, record: WorkerRecord, prompt: PromptKeys, now_s: float) -> Holdings:
        block_tokens = record.block_tokens
        held = self._unbroken(prompt.block_keys(record), now_s)
        blocks = self._bits(held)
        reach = blocks.sum(axis=0, dtype=np.int64) * block_tokens
        usable = held[: (prompt.tokens - 1) // block_tokens]
        keys = prompt.block_keys(record)[: len(usable)] ^ np.uint64(CHECKPOINT)
        points = self._bits(self._sets(keys, now_s) & usable)
        deepest = np.zeros_like(reach)
        at, columns = np.nonzero(points)
        deepest[columns] = (at + 1) * block_tokens  # ascending: the last one of a column stays
        return Holdings(reach, deepest, points, block_tokens)

    def nobody(self, record: WorkerRecord, prompt: PromptKeys) -> bool:
        """Certainly `holdings` would find nothing: its first block is nowhere, and no state was ever saved inside one. Most
        new prompts; looking up one key is not worth the arrays."""
        first = prompt.first_number(record)
        if first is not None and (first in self._gathered or self.expected.has(first) or self._table.may_have(first)):
            return False
        return self._first_position >= min(record.block_tokens, prompt.tokens)

    def _unbroken(self, keys: U64, now_s: float) -> U64:
        """(n, WORDS) columns that hold every block up to this one, until nobody does."""
        parts, alive = [np.zeros((0, WORDS), np.uint64)], np.full(WORDS, ~np.uint64(0))
        for at in (0, *range(FIRST_BLOCKS, len(keys), MORE_BLOCKS)):
            sets = self._sets(keys[at : at + (MORE_BLOCKS if at else FIRST_BLOCKS)], now_s)
            if not len(sets):
                break
            sets[0] &= alive
            held = np.bitwise_and.accumulate(sets, axis=0)
            parts.append(held[held.any(axis=1)])
            alive = held[-1]
            if not alive.any():
                break
        return np.concatenate(parts)

    def _sets(self, keys: U64, now_s: float) -> U64:
        if not len(keys):
            return np.zeros((0, WORDS), np.uint64)
        sets, gathered = self._table.lookup(keys), self._gathered
        if gathered:
            for i, found in enumerate(map(gathered.get, keys.tolist())):
                if found is not None:
                    sets[i] = sets[i] & ~words_of(found[1]) | words_of(found[0])
        return self.expected.merge(sets, keys, now_s)

    def _with_tails(self, found: Holdings, record: WorkerRecord, prompt: PromptKeys, now_s: float) -> Holdings:
        """A checkpoint inside the block after the attention reach extends it: a donated state comes with its partial tail
        block. One inside an earlier block is as good as any."""
        if self._first_position >= prompt.tokens:
            return found
        last = np.minimum(found.reach + record.block_tokens, prompt.tokens) - 1
        positions = list(self._tail_positions(found, last, record.block_tokens))
        if not positions:
            return found
        keys = prompt.tail_keys(record, positions) ^ np.uint64(CHECKPOINT)
        at = np.array(positions)[:, None]
        fits = (self._bits(self._sets(keys, now_s)) != 0) & (at <= last) & (at > found.deepest)
        tail = np.where(fits, at, 0).max(axis=0)
        return Holdings(
            np.maximum(found.reach, tail), np.maximum(found.deepest, tail), found.points, record.block_tokens
        )

    def _tail_positions(self, found: Holdings, last: NDArray[np.int64], block_tokens: int) -> Iterator[int]:
        """Known positions inside blocks that could help somebody: those right behind a reach first, then the deepest."""
        known = self._positions[: int(last.max()) + 1]
        if not known.any():
            return
        left = MAX_TAILS
        behind = np.zeros(len(known), bool)
        for reach in np.unique(found.reach)[::-1].tolist():
            behind[reach : reach + block_tokens] = True
        behind[::block_tokens] = False
        others = known & ~behind
        others[: int(found.deepest.min()) + 1] = False
        others[::block_tokens] = False
        for part in (known & behind, others):
            at = np.flatnonzero(part)[::-1][:left].tolist()
            left -= len(at)
            yield from at

    def _bits(self, sets: U64) -> NDArray[np.uint8]:
        """(n, columns) of 0 and 1, of as many columns as were ever taken, in whole words."""
        words = np.ascontiguousarray(sets[:, : self._words])
        return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")


def _columns(bits: int) -> Iterator[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def expected_states(
    record: WorkerRecord, blocks: Sequence[int], prompt_tokens: int, resumed_tokens: int, reach_tokens: int
) -> list[int]:
    """Keys of the states that a worker will keep while it computes the prompt of these blocks from `resumed_tokens` on."""
    size, interval_tokens = record.block_tokens, 0
    if record.block_bytes:
        interval_tokens = -(-INTERVAL_STATE_SHARE * record.slot_bytes // record.block_bytes) * size
    if interval_tokens >= prompt_tokens:
        interval_tokens = 0  # the first one would be behind it
    kept = checkpoint_positions(resumed_tokens, reach_tokens, prompt_tokens, size, interval_tokens)
    return [blocks[at // size - 1] ^ CHECKPOINT for at in kept]
