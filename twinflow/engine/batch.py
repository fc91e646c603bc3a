"""From a step plan to what the model reads: persistent block tables, and the step's inputs packed into one buffer.

One buffer means one copy to the device per step, and fixed places in it mean that a captured CUDA graph can be replayed
on the inputs of any step of its size. A token that a step still in flight is going to draw has no id on the host yet: it
is named by the row of its sequence, and read on the device from where sampling leaves it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.base import SlotId
from twinflow.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """`tokens` tokens of a sequence, fed from position `start` on. `drawn_ahead`: the one token is still being drawn by a
    step in flight. `samples`: after it nothing known is left, so the next token is drawn. `snapshot`: leave the state after
    so many of its tokens in this slot."""

    sequence: Sequence
    start: int
    tokens: int
    drawn_ahead: bool
    samples: bool
    snapshot: tuple[int, SlotId] | None = None

    @classmethod
    def next_of(cls, sequence: Sequence, tokens: int) -> "Part":
        start = sequence.fed_tokens
        end = start + tokens
        return cls(sequence, start, tokens, start >= len(sequence.chain), end == sequence.known_tokens)


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
        self.version = 0  # counts the assignments

    @property
    def empty_row(self) -> int:
        return self.rows

    def assign(self, sequence: Sequence) -> int:
        """Gives the sequence a row with its reserved blocks; returns it."""
        assert sequence.holding is not None and sequence.row is None
        row = sequence.row = self._free.pop()
        self.version += 1
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
    def size_bytes(self) -> int:
        return 8 * (4 * self.tokens + 5 * self.sequences) + 4 * (3 * self.sequences + 1) + self.sequences


@dataclass(frozen=True, slots=True)
class Fields:
    """The inputs of a step as views of one buffer: numpy on the host, torch on the device, the same places.

    Of T tokens: `ids`, `sources` (row whose drawn token it is, -1 = `ids` holds it), `positions`, `kv_slots`. Of B
    sequences: `state_rows`, `rows` (of the block tables), `contexts`, `fresh`, `snapshot_rows` (-1 = none) and
    `snapshot_after`; `starts` (B + 1,) are the prefix sums of their tokens. Of those that draw, in the first places of B:
    `logit_rows` (the token behind which they draw), `draw_rows`.
    """

    ids: torch.Tensor
    sources: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    state_rows: torch.Tensor
    rows: torch.Tensor
    logit_rows: torch.Tensor
    draw_rows: torch.Tensor
    snapshot_rows: torch.Tensor
    starts: torch.Tensor
    contexts: torch.Tensor
    snapshot_after: torch.Tensor
    fresh: torch.Tensor

    @classmethod
    def of(cls, buffer: torch.Tensor, shape: Shape) -> "Fields":
        """Views of a uint8 buffer of at least `shape.size_bytes`, 8-byte aligned."""
        t, b = shape.tokens, shape.sequences
        at = 0
        views = []
        sizes = [(t, torch.int64)] * 4 + [(b, torch.int64)] * 5
        for count, dtype in [*sizes, (b + 1, torch.int32), (b, torch.int32), (b, torch.int32), (b, torch.bool)]:
            size = count * dtype.itemsize
            views.append(buffer[at : at + size].view(dtype))
            at += size
        return cls(*views)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the host knows of a packed step. `drawing`: indices of the parts that draw a token, in the order of
    `logit_rows`."""

    parts: tuple[Part, ...]
    shape: Shape
    drawing: tuple[int, ...]

    @classmethod
    def of(cls, parts: Seq[Part]) -> "Plan":
        drawing = tuple(i for i, p in enumerate(parts) if p.samples)
        return cls(tuple(parts), Shape(sum(p.tokens for p in parts), len(parts)), drawing)

    @property
    def contexts(self) -> tuple[int, ...]:
        return tuple(p.start + p.tokens for p in self.parts)

    @property
    def lens(self) -> tuple[int, ...]:
        return tuple(p.tokens for p in self.parts)

    @property
    def snapshots(self) -> bool:
        return any(p.snapshot is not None for p in self.parts)

    @property
    def decode_only(self) -> bool:
        return self.shape.is_decode


def pack(plan: Plan, shape: Shape, into: Fields, geometry: ArenaGeometry, empty_row: int) -> None:
    """Fills host views of `shape`, which is the plan's own or larger. What is left over becomes padding: tokens without a
    state, a context or anything to write, one in each spare sequence where that comes out even, else all in the first.

    KV of positions below a holding's `written_tokens` is there and not written again.
    """
    views = {name: getattr(into, name).numpy() for name in Fields.__slots__}
    lens = np.fromiter(plan.lens, np.int64, len(plan.parts))
    ends = np.cumsum(lens)
    tokens, sequences = plan.shape.tokens, plan.shape.sequences
    views["starts"][0] = 0
    views["starts"][1 : sequences + 1] = ends
    spare, empty = shape.tokens - tokens, shape.sequences - sequences
    one_each = spare == empty  # as in a batch of single tokens, which it stays
    views["starts"][sequences + 1 :] = tokens + np.arange(1, empty + 1) if one_each else shape.tokens
    holdings = [p.sequence.holding for p in plan.parts]
    starts = np.fromiter((p.start for p in plan.parts), np.int64, sequences)
    views["contexts"][:sequences] = starts + lens
    views["fresh"][:sequences] = starts == 0
    views["rows"][:sequences] = [p.sequence.row for p in plan.parts]
    views["state_rows"][:sequences] = [
        geometry.slot_row(h.slot) for h in holdings if h is not None and h.slot is not None
    ]
    for name, rest in (("contexts", 0), ("fresh", True), ("rows", empty_row), ("state_rows", -1)):
        views[name][sequences:] = rest
    views["logit_rows"][: len(plan.drawing)] = ends[list(plan.drawing)] - 1
    views["draw_rows"][: len(plan.drawing)] = views["rows"][list(plan.drawing)]
    views["logit_rows"][len(plan.drawing) :] = views["draw_rows"][len(plan.drawing) :] = 0
    views["positions"][:tokens] = np.arange(tokens) + np.repeat(starts - (ends - lens), lens)
    views["sources"][:] = -1
    views["ids"][tokens:] = views["positions"][tokens:] = 0
    views["kv_slots"][tokens:] = -1
    views["snapshot_rows"][:] = -1
    views["snapshot_after"][:] = 0
    at = 0
    for i, part in enumerate(plan.parts):
        if part.snapshot is not None:
            views["snapshot_after"][i] = part.snapshot[0]
            views["snapshot_rows"][i] = geometry.slot_row(part.snapshot[1])
        if part.tokens == 1:
            _pack_one(part, at, views)
        else:
            _pack_chunk(part, at, views)
        at += part.tokens


def _pack_one(part: Part, at: int, views: dict[str, np.ndarray]) -> None:
    """A single token, without the price of small arrays."""
    sequence, start = part.sequence, part.start
    assert sequence.holding is not None and sequence.row is not None
    if part.drawn_ahead:
        views["sources"][at] = sequence.row
        views["ids"][at] = 0
    else:
        views["ids"][at] = sequence.chain.token(start)
    if start < sequence.holding.written_tokens:
        views["kv_slots"][at] = -1
    else:
        block, offset = divmod(start, sequence.chain.block_tokens)
        views["kv_slots"][at] = sequence.holding.blocks[block] * sequence.chain.block_tokens + offset


def _pack_chunk(part: Part, at: int, views: dict[str, np.ndarray]) -> None:
    sequence, start, end = part.sequence, part.start, part.start + part.tokens
    assert sequence.holding is not None
    bt = sequence.chain.block_tokens
    views["ids"][at : at + part.tokens] = np.frombuffer(sequence.chain.packed(start, end), dtype=np.uint32)
    where = np.arange(start, end, dtype=np.int64)
    first = start // bt
    blocks = np.asarray(sequence.holding.blocks[first : (end - 1) // bt + 1], dtype=np.int64)
    slots = blocks[where // bt - first] * bt + where % bt
    slots[where < sequence.holding.written_tokens] = -1
    views["kv_slots"][at : at + part.tokens] = slots
