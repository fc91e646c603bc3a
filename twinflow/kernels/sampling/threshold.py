"""The least likely token that top-k and top-p keep, exactly, without a sort. Part of `triton.py`.

1. Count and weigh what lies above 16 pivots, placed by the largest logit and by the mean and spread of all: two neighbours
enclose the threshold. 2. Gather the keys between them, a small part of the row. 3. One program per row narrows the interval
of keys, 16 cuts at a time, to one key. Where too many keys lie between the pivots, step 3 reads the whole row instead.
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.sampling.row import (
    BEST,
    COUNT,
    COUNTS,
    FILLED,
    LEAST_KEY,
    MASSES,
    NO_KEY,
    PIVOTS,
    QUOTA,
    SCRATCH,
    SQUARES,
    SUM,
    TEMPERATURE,
    THRESHOLD,
    TOP_K,
    TOP_P,
    WORDS,
    adjusted,
    best_value,
    float_word,
    is_drawable,
    key_value,
    live_keys,
    order_key,
    weight_scale,
    weights,
)
from twinflow.kernels.triton_tools import multiprocessors

_ROOM = 32768  # keys gathered per row
_TILE = 1024


def find_thresholds(
    row_args: tuple[torch.Tensor | int, ...], steps: torch.Tensor, scratch: torch.Tensor, n: int, vocab: int
) -> None:
    """Writes THRESHOLD and QUOTA of every row that has top-k or top-p and a distribution."""
    keys = torch.empty(n, _ROOM, dtype=torch.int32, device=steps.device)
    splits = min(triton.cdiv(vocab, _TILE), max(1, 8 * multiprocessors(steps.device) // n))
    common = {"TILE": _TILE, "ROOM": _ROOM, "num_warps": 4, "enable_fp_fusion": False}
    _weigh_pivots[(n, splits)](*row_args, steps, scratch, n, vocab, **common)
    _gather_keys[(n, splits)](*row_args, steps, scratch, keys, n, vocab, **common)
    _narrow[(n,)](*row_args, steps, scratch, keys, n, vocab, **common)


@triton.jit
def _is_asked(record, best):
    wanted = (tl.load(record + TOP_K) > 0) | (float_word(record, TOP_P) < 1.0)
    return wanted & (float_word(record, TEMPERATURE) > 0.0) & is_drawable(best)


@triton.jit
def _pivots(scratch, best):
    """(PIVOTS,) int32 keys, descending: 6 from the largest logit down to 2.4 deviations above the mean, 9 through the bulk,
    and the key of -inf."""
    count = tl.maximum(tl.load(scratch + COUNT).to(tl.float32), 1.0)
    mean = tl.load(scratch + SUM).to(tl.float32) / 65536.0 / count
    spread = tl.sqrt(tl.maximum(tl.load(scratch + SQUARES).to(tl.float32) / 65536.0 / count - mean * mean, 0.0))
    i = tl.arange(0, PIVOTS)
    shoulder = tl.minimum(mean + 2.4 * spread, best)
    head = best - (best - shoulder) * (i + 1).to(tl.float32) / 6.0
    bulk = mean + (2.4 - 0.42 * (i - 5).to(tl.float32)) * spread
    value = tl.minimum(tl.where(i < 6, tl.maximum(head, shoulder), bulk), best)
    key = order_key(tl.where(value == 0.0, 0.0, value))
    return tl.where(i == PIVOTS - 1, LEAST_KEY, key)


@triton.jit
def _pick(values, i, at):
    """values[at] of a vector indexed by i; 0 where there is no such entry."""
    return tl.sum(tl.where(i == at, values, 0), 0)


@triton.jit
def _mass_target(top_p, total):
    """ceil(top_p * total), at least 1."""
    exact = top_p * total.to(tl.float64)
    target = exact.to(tl.int64)
    return tl.maximum(target + (target.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def _bracket(record, scratch, best):
    """(low, high, keys between, keys above, mass above): low <= threshold < high, from the pivots' counts and masses.

    With both top-k and top-p the interval reaches to the top: the second threshold is searched among the same keys.
    """
    i = tl.arange(0, PIVOTS)
    pivots = _pivots(scratch, best).to(tl.int64)
    counts = tl.load(scratch + COUNTS + i)
    masses = tl.load(scratch + MASSES + i)
    top_k = tl.load(record + TOP_K)
    top_p = float_word(record, TOP_P)
    by_count = top_k > 0
    target = tl.where(by_count, top_k, _mass_target(top_p, _pick(masses, i, PIVOTS - 1)))
    at = tl.sum((tl.where(by_count, counts, masses) < target).to(tl.int32), 0)
    low = _pick(pivots, i, at)
    open_top = (at == 0) | (by_count & (top_p < 1.0))
    high = tl.where(open_top, order_key(best).to(tl.int64) + 1, _pick(pivots, i, at - 1))
    above = tl.where(open_top, 0, _pick(counts, i, at - 1))
    mass_above = tl.where(open_top, 0, _pick(masses, i, at - 1))
    return low, high, _pick(counts, i, at) - above, above, mass_above


@triton.jit(do_not_specialize=["n", "V"])
def _weigh_pivots(
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
    ROOM: tl.constexpr,
):
    """Grid (n, splits). Adds up COUNTS and MASSES of the keys at or above each pivot."""
    i = tl.program_id(0)
    record = records + tl.load(steps + i) * WORDS
    scratch += i * SCRATCH
    best = best_value(tl.load(scratch + BEST))
    if _is_asked(record, best):
        position = tl.load(steps + n + i)
        base = logits + i.to(tl.int64) * stride
        scale = weight_scale(record)
        pivots = _pivots(scratch, best)
        counts = tl.zeros((PIVOTS,), tl.int32)
        masses = tl.zeros((PIVOTS,), tl.int64)
        for start in range(tl.program_id(1) * TILE, V, tl.num_programs(1) * TILE):
            x = adjusted(base, record, histories, history_stride, edits, position, start, V, TILE)
            more_counts, more_masses = _above(live_keys(x, start, V, TILE), weights(x, best, scale), pivots)
            counts += more_counts
            masses += more_masses
        p = tl.arange(0, PIVOTS)
        tl.atomic_add(scratch + COUNTS + p, counts.to(tl.int64))
        tl.atomic_add(scratch + MASSES + p, masses)


@triton.jit
def _above(keys, weight, pivots):
    """How many of keys (TILE,) are at or above each pivot (PIVOTS,), int32, and what they weigh, int64."""
    above = keys[:, None] >= pivots[None, :]
    return tl.sum(above.to(tl.int32), 0), tl.sum(tl.where(above, weight[:, None], 0), 0)


@triton.jit(do_not_specialize=["n", "V"])
def _gather_keys(
    logits,
    stride,
    records,
    histories,
    history_stride,
    edits,
    steps,
    scratch,
    keys,
    n,
    V,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Grid (n, splits). Writes the keys inside the bracket to keys (n, ROOM), in any order, unless there are too many."""
    i = tl.program_id(0)
    record = records + tl.load(steps + i) * WORDS
    scratch += i * SCRATCH
    best = best_value(tl.load(scratch + BEST))
    if _is_asked(record, best):
        low, high, between, _, _ = _bracket(record, scratch, best)
        if between <= ROOM:
            position = tl.load(steps + n + i)
            base = logits + i.to(tl.int64) * stride
            for start in range(tl.program_id(1) * TILE, V, tl.num_programs(1) * TILE):
                x = adjusted(base, record, histories, history_stride, edits, position, start, V, TILE)
                key = live_keys(x, start, V, TILE)
                inside = (key >= low) & (key < high)
                found = tl.sum(inside.to(tl.int32), 0)
                if found > 0:
                    at = tl.atomic_add(scratch + FILLED, found.to(tl.int64))
                    place = at + tl.cumsum(inside.to(tl.int32), 0) - 1
                    tl.store(keys + i.to(tl.int64) * ROOM + place, key, mask=inside)


@triton.jit(do_not_specialize=["n", "V"])
def _narrow(
    logits,
    stride,
    records,
    histories,
    history_stride,
    edits,
    steps,
    scratch,
    keys,
    n,
    V,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Grid (n,). Finds THRESHOLD and QUOTA: top-k first, then top-p within what it kept.

    Invariant of the search: the keys at or above `low` suffice for the target, those at or above `high` do not; (count, mass)
    of the latter are known.
    """
    i = tl.program_id(0)
    record = records + tl.load(steps + i) * WORDS
    scratch += i * SCRATCH
    best = best_value(tl.load(scratch + BEST))
    if _is_asked(record, best):
        position = tl.load(steps + n + i)
        base = logits + i.to(tl.int64) * stride
        keys += i.to(tl.int64) * ROOM
        scale = weight_scale(record)
        low, high, between, count_above, mass_above = _bracket(record, scratch, best)
        # Where the keys come from, and what lies above all of them.
        gathered = between <= ROOM
        size = tl.where(gathered, between, V).to(tl.int32)
        outside = tl.where(gathered, count_above, 0)
        mass_outside = tl.where(gathered, mass_above, 0)
        top_k = tl.load(record + TOP_K)
        top_p = float_word(record, TOP_P)
        p = tl.arange(0, PIVOTS)
        by_count = top_k > 0
        target = top_k
        if not by_count:
            target = _mass_target(top_p, tl.load(scratch + MASSES + PIVOTS - 1))
        searching = tl.full((), True, tl.int1)
        quota = tl.full((), 0, tl.int64)
        while searching:
            while high - low > 1:
                step = (high - low + PIVOTS) // (PIVOTS + 1)
                cuts = low + (p + 1) * step
                pivots = tl.minimum(cuts, (1 << 31) - 1).to(tl.int32)
                counts = tl.zeros((PIVOTS,), tl.int32)
                masses = tl.zeros((PIVOTS,), tl.int64)
                for start in range(0, size, TILE):
                    if gathered:
                        at = start + tl.arange(0, TILE)
                        key = tl.load(keys + at, mask=at < size, other=NO_KEY)
                        x = key_value(tl.where(key == NO_KEY, LEAST_KEY, key))
                    else:
                        x = adjusted(base, record, histories, history_stride, edits, position, start, V, TILE)
                        key = live_keys(x, start, V, TILE)
                    more_counts, more_masses = _above(key, weights(x, best, scale), pivots)
                    counts += more_counts
                    masses += more_masses
                all_counts = counts.to(tl.int64) + outside
                all_masses = masses + mass_outside
                at_cut = tl.sum((tl.where(by_count, all_counts, all_masses) >= target).to(tl.int32), 0)
                next_cut = low + (at_cut + 1).to(tl.int64) * step
                if (at_cut < PIVOTS) & (next_cut < high):
                    high = next_cut
                    count_above = _pick(all_counts, p, at_cut)
                    mass_above = _pick(all_masses, p, at_cut)
                low += at_cut.to(tl.int64) * step
            weight = weights(key_value(low.to(tl.int32)), best, scale)
            searching = tl.full((), False, tl.int1)
            if by_count:
                quota = target - count_above
                if top_p < 1.0:
                    target = _mass_target(top_p, mass_above + quota * weight)
                    by_count = top_k < 0
                    if target > mass_above:
                        quota = tl.cdiv(target - mass_above, weight)
                    else:
                        searching = tl.full((), True, tl.int1)
                        low += 1
                        high = order_key(best).to(tl.int64) + 1
                        count_above = tl.full((), 0, tl.int64)
                        mass_above = tl.full((), 0, tl.int64)
            else:
                quota = tl.cdiv(target - mass_above, weight)
        tl.store(scratch + THRESHOLD, low)
        tl.store(scratch + QUOTA, quota)
