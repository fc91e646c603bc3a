"""From a bracket to the threshold itself: one program per row, searching among gathered logits. Part of `threshold.py`.

A search is (low, high, above), two keys and a measure: what is at or above `low` measures at least the target; what is at or
above `high` less, namely `above`. A source is (gathered, size, outside): `size` gathered logits, or those of the row; it holds
all from low to high, and `outside` is the measure of what it lacks above them.
"""

import triton
import triton.language as tl

from twinflow.kernels.sampling.pivots import PIVOTS, bracket, mass_target, measure, no_measures, pick, totals
from twinflow.kernels.sampling.row import (
    BEST,
    FILLED,
    FROM_HIGH,
    FROM_LOW,
    LEAST_KEY,
    QUOTA,
    SCRATCH,
    THRESHOLD,
    TOP_K,
    TOP_P,
    TOTAL,
    adjusted,
    best_value,
    float_word,
    has_threshold,
    is_drawn,
    key_value,
    open_row,
    order_key,
    thread_sums,
    weight_scale,
    weights,
)


@triton.jit(do_not_specialize=["n", "V"])
def narrow(
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
    """Grid (n,). Writes THRESHOLD and QUOTA: top-k first, then top-p within what it kept."""
    row = open_row(logits, stride, records, histories, history_stride, edits, steps, n, V)
    record = row[0]
    scratch += tl.program_id(0) * SCRATCH
    kept += tl.program_id(0).to(tl.int64) * ROOM
    best = best_value(tl.load(scratch + BEST))
    if has_threshold(record) & is_drawn(record, best):
        scale = weight_scale(record)
        top_k = tl.load(record + TOP_K)
        top_p = float_word(record, TOP_P)
        both = (top_k > 0) & (top_p < 1.0)
        search, source, target = _begin(record, scratch, best, V, ROOM)
        quota = tl.full((), 0, tl.int64)
        for stage in range(tl.where(both, 2, 1)):
            by_count = (top_k > 0) & (stage == 0)
            again = both & (stage == 0)
            search, source = _search(
                search, source, target, by_count, again, kept, row, best, scale, ROOM, TILE, THREADS, ADJUSTS
            )
            low, high, above = search
            weight = weights(key_value(low), best, scale)
            quota = tl.where(by_count, target - above, tl.cdiv(target - above, tl.maximum(weight, 1)))
            if again:
                above = _mass_above(low, source, kept, row, best, scale, TILE, THREADS, ADJUSTS)
                target = mass_target(top_p, above + quota * weight)
                if target <= above:  # else the threshold stays, with a smaller quota
                    low += 1
                    high = order_key(best).to(tl.int64) + 1
                    above = tl.full((), 0, tl.int64)
            search = (low, high, above)
        low, _, _ = search
        tl.store(scratch + THRESHOLD, low)
        tl.store(scratch + QUOTA, quota)


@triton.jit
def _begin(record, scratch, best, V, ROOM: tl.constexpr):
    """(search, source, target): among the gathered logits, or in the whole row where these do not enclose the threshold."""
    low, high, above = bracket(record, scratch, best)
    filled = tl.load(scratch + FILLED)
    gathered = filled <= ROOM
    target = tl.load(record + TOP_K)
    if target == 0:
        target = mass_target(float_word(record, TOP_P), tl.load(scratch + TOTAL))
        above = tl.load(scratch + FROM_HIGH)
        gathered = gathered & (above < target) & (tl.load(scratch + FROM_LOW) >= target)
    if not gathered:
        low = tl.full((), LEAST_KEY, tl.int64)
        high = order_key(best).to(tl.int64) + 1
        above = tl.full((), 0, tl.int64)
    return (low, high, above), (gathered, tl.where(gathered, filled, V).to(tl.int32), above), target


@triton.jit
def _search(
    search,
    source,
    target,
    by_count,
    keep_top,
    kept,
    row,
    best,
    scale,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    """(search, source) once high = low + 1. With `keep_top` the source still holds all from low on then."""
    low, high, above = search
    gathered, size, outside = source
    top = order_key(best).to(tl.int64) + 1
    while high - low > 1:
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        cuts = tl.tuple(())
        for p in tl.static_range(PIVOTS):
            cuts += (key_value(tl.minimum(low + (p + 1) * step, top)),)
        sums = no_measures(THREADS, tl.int64)
        for start in range(0, size, TILE):
            x = _load((gathered, size, outside), kept, row, start, TILE, ADJUSTS)
            sums = measure(x, tl.where(by_count, 1, weights(x, best, scale)), cuts, sums, THREADS)
        measures = totals(sums) + outside
        at = tl.sum((measures >= target).to(tl.int32), 0).to(tl.int64)
        if (at < PIVOTS) & (low + (at + 1) * step < high):
            high = low + (at + 1) * step
            above = pick(measures, at)
        low += at * step
        if size > TILE:
            end = tl.where(keep_top, top, high)
            left = _keep(low, end, (gathered, size, outside), kept, row, ROOM, TILE, ADJUSTS)
            if left <= ROOM:
                gathered = left <= ROOM
                size = left
                outside = tl.where(keep_top, 0, above)
    return (low, high, above), (gathered, size, outside)


@triton.jit
def _keep(low, end, source, kept, row, ROOM: tl.constexpr, TILE: tl.constexpr, ADJUSTS: tl.constexpr):
    """Writes the logits of the source in low..end-1 to `kept`, as many as fit, and returns how many there are. In place: what a
    tile overwrites was read before, by this tile or an earlier one."""
    low, end = key_value(low), key_value(end)
    left = tl.full((), 0, tl.int32)
    for start in range(0, source[1], TILE):
        x = _load(source, kept, row, start, TILE, ADJUSTS)
        inside = (x >= low) & (x < end)
        place = left + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.debug_barrier()
        tl.store(kept + place, x, mask=inside & (place < ROOM))
        left += tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()
    return left


@triton.jit
def _mass_above(low, source, kept, row, best, scale, TILE: tl.constexpr, THREADS: tl.constexpr, ADJUSTS: tl.constexpr):
    """What the logits of the source above `low` weigh."""
    low = key_value(low)
    mass = tl.zeros((THREADS,), tl.int64)
    for start in range(0, source[1], TILE):
        x = _load(source, kept, row, start, TILE, ADJUSTS)
        mass += thread_sums(tl.where(x > low, weights(x, best, scale), 0), THREADS)
    return tl.sum(mass, 0)


@triton.jit
def _load(source, kept, row, start, TILE: tl.constexpr, ADJUSTS: tl.constexpr):
    """A tile of the source; -inf where it has ended."""
    gathered, size, _ = source
    if gathered:
        at = start + tl.arange(0, TILE)
        x = tl.load(kept + at, mask=at < size, other=float("-inf"))
    else:
        x = adjusted(row, start, TILE, ADJUSTS)
    return x
