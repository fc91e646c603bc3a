"""From a step plan to what the model reads: persistent block tables, and the step's inputs packed into one buffer.

One buffer means one copy to the device per step, and fixed places in it mean that a captured CUDA graph can be replayed
on the inputs of any step of its size. A token that a step still in flight is going to draw has no id on the host yet: it
is named by the row of its sequence, and read on the device from where sampling leaves it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.base import SlotId
from twinflow.engine.sequence import Sequence
from twinflow.kernels.base import STATE_CHUNK_TOKENS

A = TypeVar("A", np.ndarray, torch.Tensor)

DTYPES: dict[type, dict[int, Any]] = {
    torch.Tensor: {8: torch.int64, 4: torch.int32, 1: torch.bool},
    np.ndarray: {8: np.dtype(np.int64), 4: np.dtype(np.int32), 1: np.dtype(np.bool_)},
}


class Part(NamedTuple):
    """`tokens` tokens of a sequence, fed from position `start` on. `drawn_ahead`: the one token is still being drawn by a
    step in flight. `samples`: after it nothing known is left, so the next token is drawn. `snapshots`: leave the states after
    so many of its tokens in these slots. (A named tuple: a step makes hundreds, at a third of a frozen dataclass's cost.)"""

    sequence: Sequence
    start: int
    tokens: int
    drawn_ahead: bool
    samples: bool
    snapshots: tuple[tuple[int, SlotId], ...] = ()

    @classmethod
    def next_of(cls, sequence: Sequence, tokens: int) -> "Part":
        """Of a sequence with memory, whose row is assigned."""
        assert sequence.holding is not None
        start = sequence.holding.position + sequence.flying_tokens
        known = sequence.chain.length
        return cls(sequence, start, tokens, start >= known, start + tokens == known + sequence.flying_draws)

    @classmethod
    def last_of(cls, sequence: Sequence) -> "Part":
        """`next_of` where a single token is left: known, or the one in flight."""
        return cls(sequence, sequence.chain.length + sequence.flying_draws - 1, 1, sequence.flying_draws > 0, True)


class BlockTables:
    """One row per running sequence, changed when a sequence starts, grows or ends, never rebuilt per step.

    `table` (rows + 1, blocks) int32 on the device, -1 beyond a sequence's blocks; the last row is empty for good and serves
    padding. `host` mirrors it. A row is given back only when no step in flight reads it.
    """

    def __init__(self, rows: int, blocks: int, device: str) -> None:
        self.rows = rows
        pinned = device != "cpu"
        self._mirror = torch.full((rows + 1, blocks), -1, dtype=torch.int32, pin_memory=pinned)
        self.host = self._mirror.numpy()
        self.table = self._mirror.to(device)
        self._used = [0] * rows  # entries of a row that may differ from -1
        self._free = list(range(rows - 1, -1, -1))
        self.seats = [0] * rows  # by row: the number of its newest assignment, of all that there were
        self._assigned = 0

    @property
    def empty_row(self) -> int:
        return self.rows

    def assign(self, sequence: Sequence) -> int:
        """Gives the sequence a row with its reserved blocks; returns it."""
        assert sequence.holding is not None and sequence.row is None
        row = sequence.row = self._free.pop()
        self._assigned += 1
        self.seats[row] = self._assigned
        blocks = sequence.holding.blocks
        self.host[row, : len(blocks)] = blocks
        self.host[row, len(blocks) : self._used[row]] = -1
        self._send(row, 0, max(len(blocks), self._used[row]))
        self._used[row] = len(blocks)
        return row

    def extend(self, sequence: Sequence, had: int) -> None:
        """The sequence's holding has grown from `had` blocks."""
        assert sequence.holding is not None and sequence.row is not None
        blocks = sequence.holding.blocks
        self.host[sequence.row, had : len(blocks)] = blocks[had:]
        self._send(sequence.row, had, len(blocks))
        self._used[sequence.row] = len(blocks)

    def free(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self._free.append(sequence.row)
            sequence.row = None

    def _send(self, row: int, start: int, end: int) -> None:
        if self.table.data_ptr() != self._mirror.data_ptr():  # on CPU both are one
            self.table[row, start:end].copy_(self._mirror[row, start:end], non_blocking=True)


def aligned(size_bytes: int) -> int:
    """Up to where the next field of a packed batch begins. Triton compiles a kernel anew where a pointer is aligned to 16 bytes
    that was not before, or the other way: with every field aligned that does not hang on a step's sizes."""
    return -(-size_bytes // 16) * 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a packed batch: T tokens in B sequences. Every sequence has room for one row of logits."""

    tokens: int
    sequences: int

    @property
    def is_decode(self) -> bool:
        """One token each."""
        return self.tokens == self.sequences

    @property
    def snapshots(self) -> int:
        """Room for all that there can be, one for each whole chunk of the state kernels."""
        return self.tokens // STATE_CHUNK_TOKENS

    @property
    def size_bytes(self) -> int:
        return places(self)[1]


@lru_cache(maxsize=1024)  # a step asks several times, and most steps are like others
def places(shape: Shape) -> tuple[tuple[tuple[slice, int], ...], int]:
    """Of each of `Fields`, in order: its bytes in the buffer, and bytes of an entry. Then the bytes of all."""
    t, b, n = shape.tokens, shape.sequences, shape.snapshots
    fields = (*((t, 8),) * 4, *((b, 8),) * 4, (n, 8), (b + 1, 4), (b, 4), (b + 1, 4), (n, 4), (b, 1))
    at, found = 0, []
    for count, size in fields:
        found.append((slice(at, at + count * size), size))
        at += aligned(count * size)
    return tuple(found), at


@dataclass(frozen=True, slots=True)
class Fields(Generic[A]):
    """The inputs of a step as views of one buffer: numpy on the host, torch on the device, the same places.

    Of T tokens: `ids`, `sources` (row whose drawn token it is, -1 = `ids` holds it), `positions`, `kv_slots`. Of B
    sequences: `state_rows`, `rows` (of the block tables), `contexts`, `fresh`; `starts` (B + 1,) are the prefix sums of
    their tokens. Of those that draw, in the first places of B: `logit_rows` (the token behind which they draw), `draw_rows`.
    States to keep are `snapshot_rows` and `snapshot_after` from `snapshot_starts` (B + 1,) on, as in `kernels.base.Snapshots`.
    """

    ids: A
    sources: A
    positions: A
    kv_slots: A
    state_rows: A
    rows: A
    logit_rows: A
    draw_rows: A
    snapshot_rows: A
    starts: A
    contexts: A
    snapshot_starts: A
    snapshot_after: A
    fresh: A

    @classmethod
    def of(cls, buffer: A, shape: Shape) -> "Fields[A]":
        """Views of a uint8 buffer of at least `shape.size_bytes`, aligned as its fields are."""
        dtypes = DTYPES[type(buffer)]
        return cls(*[buffer[where].view(dtypes[size]) for where, size in places(shape)[0]])


@dataclass(frozen=True, slots=True)
class Plan:
    """What the host knows of a packed step. `sequences`, `starts` and `lens` are its parts by columns; `drawing`: indices of
    the parts that draw a token, in the order of `logit_rows`."""

    parts: tuple[Part, ...]
    shape: Shape
    sequences: tuple[Sequence, ...]
    starts: tuple[int, ...]
    lens: tuple[int, ...]
    drawing: tuple[int, ...]

    @classmethod
    def of(cls, parts: Seq[Part]) -> "Plan":
        sequences, starts, lens, _, samples, _ = zip(*parts, strict=True) if parts else ((),) * 6
        drawing = tuple(range(len(parts))) if all(samples) else tuple([i for i, p in enumerate(parts) if p.samples])
        return cls(tuple(parts), Shape(sum(lens), len(parts)), sequences, starts, lens, drawing)

    @property
    def contexts(self) -> tuple[int, ...]:
        return tuple(map(add, self.starts, self.lens))

    @property
    def snapshots(self) -> bool:
        return any(p.snapshots for p in self.parts)

    @property
    def decode_only(self) -> bool:
        return self.shape.is_decode


def pack(plan: Plan, shape: Shape, into: Fields[np.ndarray], geometry: ArenaGeometry, tables: BlockTables) -> None:
    """Fills host views of `shape`, which is the plan's own or larger. What is left over becomes padding: tokens without a
    state, a context or anything to write, one in each spare sequence where that comes out even, else all in the first.

    KV of positions below a holding's `written_tokens` is there and not written again.
    """
    parts, tokens, sequences = plan.parts, plan.shape.tokens, plan.shape.sequences
    starts, lens = np.array(plan.starts, dtype=np.int64), np.array(plan.lens, dtype=np.int64)
    ends = np.cumsum(lens)
    into.starts[0] = 0
    into.starts[1 : sequences + 1] = ends
    spare, empty = shape.tokens - tokens, shape.sequences - sequences
    one_each = spare == empty  # as in a batch of single tokens, which it stays
    into.starts[sequences + 1 :] = tokens + np.arange(1, empty + 1) if one_each else shape.tokens
    into.contexts[:sequences] = starts + lens
    into.fresh[:sequences] = starts == 0
    into.rows[:sequences] = [s.row for s in plan.sequences]
    slots = [s.holding.slot for s in plan.sequences if s.holding]
    into.state_rows[:sequences] = geometry.slot_row(0) - np.array(slots, dtype=np.int64)
    for view, rest in ((into.contexts, 0), (into.fresh, True), (into.rows, tables.empty_row), (into.state_rows, -1)):
        view[sequences:] = rest
    drawing = np.array(plan.drawing, dtype=np.int64)
    into.logit_rows[: len(drawing)] = ends[drawing] - 1
    into.draw_rows[: len(drawing)] = into.rows[drawing]
    into.logit_rows[len(drawing) :] = into.draw_rows[len(drawing) :] = 0
    into.positions[:tokens] = np.arange(tokens) + np.repeat(starts - (ends - lens), lens)
    into.sources[:] = -1
    into.ids[tokens:] = into.positions[tokens:] = 0
    into.kv_slots[tokens:] = -1
    into.snapshot_starts[:] = kept = 0
    singles = np.flatnonzero(lens == 1)
    if len(singles) == sequences:
        _pack_singles(parts, slice(0, tokens), into.rows[:sequences], into, tables)
    elif len(singles):
        _pack_singles([parts[i] for i in singles.tolist()], ends[singles] - 1, into.rows[singles], into, tables)
    for i in np.flatnonzero(lens > 1).tolist():
        _pack_chunk(parts[i], int(ends[i] - lens[i]), into)
        for after, slot in parts[i].snapshots:
            into.snapshot_after[kept], into.snapshot_rows[kept] = after, geometry.slot_row(slot)
            kept += 1
        into.snapshot_starts[i + 1 :] = kept


def _pack_singles(
    parts: Seq[Part], at: np.ndarray | slice, rows: np.ndarray, into: Fields[np.ndarray], tables: BlockTables
) -> None:
    """Parts of a single token each, of sequences in `rows`; they go to the places `at`."""
    if not parts:
        return
    ahead = [p.drawn_ahead for p in parts]
    if all(ahead):
        into.ids[at], into.sources[at] = 0, rows
    else:
        into.ids[at] = [0 if p.drawn_ahead else p.sequence.chain.token(p.start) for p in parts]
        into.sources[at] = np.where(ahead, rows, -1)
    starts, size = into.positions[at], parts[0].sequence.chain.block_tokens
    slots = tables.host[rows, starts // size].astype(np.int64) * size + starts % size
    written = [p.sequence.holding.written_tokens for p in parts if p.sequence.holding]
    slots[starts < np.array(written)] = -1
    into.kv_slots[at] = slots


def _pack_chunk(part: Part, at: int, into: Fields[np.ndarray]) -> None:
    sequence, start, end = part.sequence, part.start, part.start + part.tokens
    assert sequence.holding is not None
    bt = sequence.chain.block_tokens
    into.ids[at : at + part.tokens] = np.frombuffer(sequence.chain.packed(start, end), dtype=np.uint32)
    first = start // bt
    blocks = np.asarray(sequence.holding.blocks[first : (end - 1) // bt + 1], dtype=np.int64)
    slots = (blocks[:, None] * bt + np.arange(bt)).reshape(-1)  # of all tokens of those blocks
    slots[: max(0, sequence.holding.written_tokens - first * bt)] = -1
    into.kv_slots[at : at + part.tokens] = slots[start - first * bt : end - first * bt]
