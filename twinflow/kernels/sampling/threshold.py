"""The least likely token that top-k and top-p keep, exactly, without a sort. Part of `triton.py`.

1. Measure (count for top-k, weigh for top-p) the logits above 16 pivots, placed by the largest logit and by the mean and spread
of all: two neighbours enclose the threshold. 2. Gather the logits between them, a small part of the row. 3. (`narrow.py`) One
program per row narrows this interval, 16 cuts at a time, down to one number.

The pivots only save time: masses above them are rough sums, which step 2 replaces by exact ones. Where these show that the
threshold lies elsewhere, or where too many logits lie between two pivots, step 3 reads the whole row.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from twinflow.kernels.sampling.narrow import narrow
from twinflow.kernels.sampling.pivots import PIVOTS, UNIT, bracket, measure, no_measures, pivot, totals
from twinflow.kernels.sampling.row import (
    BEST,
    FILLED,
    FROM_HIGH,
    FROM_LOW,
    SCRATCH,
    SHARES,
    TOP_K,
    TOTAL,
    WEIGHT_ONE,
    adjusted,
    best_value,
    has_threshold,
    is_drawn,
    key_value,
    open_row,
    splits_for,
    thread_sums,
    weight_scale,
    weights,
)

_ROOM = 32768  # logits gathered per row
_PIVOT_TILE, _PIVOT_WARPS, _PIVOT_PROGRAMS = 2048, 8, 4
_GATHER_TILE, _GATHER_WARPS, _GATHER_PROGRAMS = 2048, 8, 8
_NARROW_TILE, _NARROW_WARPS = 1024, 8


def find_thresholds(args: tuple[Any, ...], n: int, vocab: int, common: dict[str, Any], device: torch.device) -> None:
    """Writes THRESHOLD and QUOTA of every row that has top-k or top-p and a distribution; `args` as of all kernels."""
    kept = torch.empty(n, _ROOM, dtype=torch.float32, device=device)
    splits = splits_for(n, vocab, _PIVOT_TILE, _PIVOT_PROGRAMS, device)
    _measure_pivots[(n, splits)](*args, TILE=_PIVOT_TILE, THREADS=32 * _PIVOT_WARPS, num_warps=_PIVOT_WARPS, **common)
    splits = splits_for(n, vocab, _GATHER_TILE, _GATHER_PROGRAMS, device)
    _gather[(n, splits)](
        *args, kept, ROOM=_ROOM, TILE=_GATHER_TILE, THREADS=32 * _GATHER_WARPS, num_warps=_GATHER_WARPS, **common
    )
    narrow[(n,)](
        *args, kept, ROOM=_ROOM, TILE=_NARROW_TILE, THREADS=32 * _NARROW_WARPS, num_warps=_NARROW_WARPS, **common
    )


@triton.jit(do_not_specialize=["n", "V"])
def _measure_pivots(
    logits,
    stride,
    records,
    histories,
    history_stride,
    edits,
    steps,
    scratch,
    n,
    V,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    """Grid (n, splits). SHARES: how many logits are at or above each pivot (top-k), or roughly what they weigh (top-p); TOTAL:
    exactly what all weigh."""
    row = open_row(logits, stride, records, histories, history_stride, edits, steps, n, V)
    record = row[0]
    scratch += tl.program_id(0) * SCRATCH
    best = best_value(tl.load(scratch + BEST))
    if has_threshold(record) & is_drawn(record, best):
        scale = weight_scale(record)
        by_count = tl.load(record + TOP_K) > 0
        pivots = tl.tuple(())
        for p in tl.static_range(PIVOTS):
            pivots += (key_value(pivot(tl.full((), p, tl.int32), scratch, best)),)
        sums = no_measures(THREADS, tl.float32)
        total = tl.zeros((THREADS,), tl.int64)
        for start in range(tl.program_id(1) * TILE, V, tl.num_programs(1) * TILE):
            x = adjusted(row, start, TILE, ADJUSTS)
            share = tl.exp2((x - best) * scale)
            total += thread_sums((share * WEIGHT_ONE).to(tl.int64), THREADS)
            sums = measure(x, tl.where(by_count, 1.0, share), pivots, sums, THREADS)
        tl.atomic_add(scratch + SHARES + tl.arange(0, PIVOTS), (totals(sums) * UNIT).to(tl.int64))
        tl.atomic_add(scratch + TOTAL, tl.sum(total, 0))


@triton.jit(do_not_specialize=["n", "V"])
def _gather(
    logits,
    stride,
    records,
    histories,
    history_stride,
    edits,
    steps,
    scratch,
    n,
    V,
    kept,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    """Grid (n, splits). Writes the logits inside the bracket to kept (n, ROOM), in any order, as many as fit; FILLED counts
    all. For top-p alone also the exact masses of the logits from both ends of the bracket on."""
    row = open_row(logits, stride, records, histories, history_stride, edits, steps, n, V)
    record = row[0]
    scratch += tl.program_id(0) * SCRATCH
    kept += tl.program_id(0).to(tl.int64) * ROOM
    best = best_value(tl.load(scratch + BEST))
    if has_threshold(record) & is_drawn(record, best):
        low, high, _ = bracket(record, scratch, best)
        low, high = key_value(low), key_value(high)
        by_mass = tl.load(record + TOP_K) == 0
        scale = weight_scale(record)
        from_low = tl.zeros((THREADS,), tl.int64)
        from_high = tl.zeros((THREADS,), tl.int64)
        for start in range(tl.program_id(1) * TILE, V, tl.num_programs(1) * TILE):
            x = adjusted(row, start, TILE, ADJUSTS)
            inside = (x >= low) & (x < high)
            if tl.max(x, 0) >= low:
                if by_mass:
                    weight = tl.where(x >= low, weights(x, best, scale), 0)
                    from_low += thread_sums(weight, THREADS)
                    from_high += thread_sums(tl.where(inside, 0, weight), THREADS)
                place = tl.cumsum(inside.to(tl.int32), 0) - 1
                place += tl.atomic_add(scratch + FILLED, tl.sum(inside.to(tl.int64), 0))
                tl.store(kept + place, x, mask=inside & (place < ROOM))
        if by_mass:
            tl.atomic_add(scratch + FROM_LOW, tl.sum(from_low, 0))
            tl.atomic_add(scratch + FROM_HIGH, tl.sum(from_high, 0))
