"""Which blocks several sequences of a batch hold, found on the host from their block tables.

Sequences with a common prefix hold the same first blocks. Such a run of blocks with the rows that hold it is a *prefix*;
prefixes nest (a system prompt that all share, documents that some share). A decode kernel then reads each prefix once for
all its rows (`prefix.py`), and for each row by itself only what follows.
"""

from dataclasses import dataclass

import numpy as np
import torch

MOST_PREFIXES = 32
DEPTH = 4  # prefixes of one row, one behind the other
LEAST_BLOCKS = 4  # a shorter common run costs more in partial results than reading it again


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Prefixes of the B rows of a block table, int32, on one device. Sizes depend on B alone, so that a captured CUDA graph
    stays valid when `copy_` changes what is in them. Views of one `buffer`.

    order (B,): rows sorted so that those of a prefix stand side by side · places (B,): where in `order` a row stands ·
    own_starts (B,): tokens of each row that its prefixes cover · members (B, DEPTH): which prefixes a row belongs to, -1 =
    none · prefixes (MOST_PREFIXES, 4): from and up to which place in `order`, from and up to which block of their tables;
    zeros where there is none.
    """

    buffer: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    own_starts: torch.Tensor
    members: torch.Tensor
    prefixes: torch.Tensor

    @classmethod
    def none(cls, rows: int, device: torch.device | str = "cpu") -> "SharedPrefixes":
        """For `rows` rows that share nothing."""
        return cls.over(torch.from_numpy(_nothing(rows)).to(device))

    @classmethod
    def over(cls, buffer: torch.Tensor) -> "SharedPrefixes":
        """Views of a buffer (B * (3 + DEPTH) + MOST_PREFIXES * 4,) int32."""
        rows = (len(buffer) - MOST_PREFIXES * 4) // (3 + DEPTH)
        order, places, own_starts, members, prefixes = buffer.split([rows, rows, rows, rows * DEPTH, MOST_PREFIXES * 4])
        return cls(buffer, order, places, own_starts, members.view(rows, DEPTH), prefixes.view(MOST_PREFIXES, 4))

    def copy_(self, other: "SharedPrefixes") -> None:
        """Takes over `other`, of as many rows, also from another device; one copy, in stream order."""
        self.buffer.copy_(other.buffer, non_blocking=True)

    def to(self, device: torch.device | str) -> "SharedPrefixes":
        return SharedPrefixes.over(self.buffer.to(device))


def group_prefixes(block_tables: np.ndarray, context_lens: np.ndarray, block_tokens: int) -> SharedPrefixes | None:
    """The prefixes of rows with one query each, on the host; None where nothing worth it is shared.

    block_tables (B, blocks) int32, -1 = no block; context_lens (B,): tokens of each row, 0 = leave this row out (padding,
    a chunk of a prompt). A row's last token and its block are always its own. The result holds as long as the rows stay
    the same and contexts only grow. Of more than `MOST_PREFIXES` prefixes those that save the most reads are kept, and at
    most `DEPTH` of one row.
    """
    full_blocks = np.maximum(np.asarray(context_lens) - 1, 0) // block_tokens
    order, common = _sorted_rows(block_tables, full_blocks)
    runs = _runs(common)
    if len(runs) > MOST_PREFIXES:
        runs = sorted(runs, key=lambda run: run.saved_blocks)[-MOST_PREFIXES:]
    prefixes = _nested(runs)
    if not prefixes:
        return None
    others = np.ones(len(block_tables), dtype=bool)
    others[order] = False
    return _filled(np.concatenate([order, np.flatnonzero(others)]), prefixes, block_tokens)


@dataclass(frozen=True, slots=True)
class _Run:
    """Sorted rows start..end-1 hold the same first `blocks` blocks."""

    start: int
    end: int
    blocks: int

    @property
    def saved_blocks(self) -> int:
        return (self.end - self.start - 1) * self.blocks


def _sorted_rows(block_tables: np.ndarray, full_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that may share, in lexicographic order of their full blocks, and how many blocks each has in common with the
    next (one fewer)."""
    rows = np.flatnonzero(full_blocks >= LEAST_BLOCKS)
    rows = rows[np.argsort(block_tables[rows, 0], kind="stable")]
    first = block_tables[rows, 0]
    new = np.ones(len(rows) + 1, dtype=bool)
    new[1:-1] = first[1:] != first[:-1]
    rows = rows[~(new[1:] & new[:-1])]
    if len(rows) == 0:
        return rows, np.zeros(0, dtype=np.int64)
    # What all rows with the same first block have in common, found against the first of them, need not be sorted by.
    first = block_tables[rows, 0]
    starts = np.flatnonzero(np.append(True, first[1:] != first[:-1]))
    sizes = np.diff(starts, append=len(rows))
    full = full_blocks[rows]
    width = int(full.max())
    tables = block_tables[rows, :width]
    common = _common_blocks(tables, np.repeat(tables[starts], sizes, 0), full)
    common = np.repeat(np.minimum.reduceat(common, starts), sizes)
    rest = common[:, None] + np.arange(int((full - common).max()))
    rest = np.take_along_axis(tables, np.minimum(rest, width - 1), 1)
    # Sorted as bytes, most significant first. What a row holds beyond its full blocks only breaks ties.
    keys = np.concatenate([first[:, None], rest], 1).astype(">i4")
    by_key = np.argsort(keys.view(f"V{keys.shape[1] * 4}").ravel(), kind="stable")
    rows, full, first, rest, common = (x[by_key] for x in (rows, full, first, rest, common))
    shared = common[1:] + _common_blocks(rest[1:], rest[:-1], np.minimum(full[1:], full[:-1]) - common[1:])
    return rows, np.where(first[1:] == first[:-1], shared, 0)


def _common_blocks(a: np.ndarray, b: np.ndarray, most: np.ndarray) -> np.ndarray:
    """How many leading columns of each row are equal, at most `most` (rows,)."""
    if a.shape[1] == 0:
        return np.zeros(len(a), dtype=np.int64)
    differ = a != b
    at = differ.argmax(1)
    return np.minimum(np.where(differ[np.arange(len(a)), at], at, a.shape[1]), most)


def _runs(common: np.ndarray) -> list[_Run]:
    """All runs of rows with at least `LEAST_BLOCKS` blocks in common, an outer one behind those inside it."""
    common = np.where(common < LEAST_BLOCKS, 0, common)
    padded = np.concatenate([[0], common, [0]])
    changes = np.flatnonzero(padded[1:] != padded[:-1])  # runs begin and end only there
    runs: list[_Run] = []
    open_runs: list[tuple[int, int]] = []  # (start, blocks), ever deeper
    for place, blocks in zip(changes.tolist(), padded[changes + 1].tolist(), strict=True):
        start = place
        while open_runs and open_runs[-1][1] > blocks:
            start, depth = open_runs.pop()
            runs.append(_Run(start, place + 1, depth))
        if blocks > (open_runs[-1][1] if open_runs else 0):
            open_runs.append((start, blocks))
    return runs


def _nested(runs: list[_Run]) -> list[tuple[int, int, int, int]]:
    """(start, end, from block, up to block) of the prefixes to read once: of runs inside each other, an inner one goes on
    where the next outer one that is read ends. Outer ones first."""
    prefixes: list[tuple[int, int, int, int]] = []
    around: list[tuple[int, int]] = []  # (end, up to block) of the prefixes that contain the run at hand
    for run in sorted(runs, key=lambda run: (run.start, -run.end)):
        while around and around[-1][0] <= run.start:
            around.pop()
        covered = around[-1][1] if around else 0
        if len(around) < DEPTH and run.blocks - covered >= LEAST_BLOCKS:
            prefixes.append((run.start, run.end, covered, run.blocks))
            around.append((run.end, run.blocks))
    return prefixes


def _nothing(rows: int) -> np.ndarray:
    """The buffer of `SharedPrefixes` for rows that share nothing."""
    buffer = np.zeros(rows * (3 + DEPTH) + MOST_PREFIXES * 4, dtype=np.int32)
    buffer[:rows] = buffer[rows : 2 * rows] = np.arange(rows)
    buffer[3 * rows : (3 + DEPTH) * rows] = -1
    return buffer


def _filled(order: np.ndarray, prefixes: list[tuple[int, int, int, int]], block_tokens: int) -> SharedPrefixes:
    rows = len(order)
    buffer = _nothing(rows)
    buffer[:rows] = order
    buffer[rows + order] = np.arange(rows)
    own_starts = buffer[2 * rows : 3 * rows]
    members = buffer[3 * rows : (3 + DEPTH) * rows].reshape(rows, DEPTH)
    depth = np.zeros(rows, dtype=np.int64)
    for i, (start, end, _, blocks) in enumerate(prefixes):
        inside = order[start:end]
        members[inside, depth[inside]] = i
        depth[inside] += 1
        own_starts[inside] = blocks * block_tokens
    buffer[(3 + DEPTH) * rows :][: 4 * len(prefixes)] = np.ravel(prefixes)
    return SharedPrefixes.over(torch.from_numpy(buffer))
