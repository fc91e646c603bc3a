"""Pivots that cut a row's keys into parts, and measures of what lies above them. Part of `threshold.py`."""

import triton
import triton.language as tl

from twinflow.kernels.sampling.row import (
    COUNT,
    LEAST_KEY,
    SHARES,
    SQUARES,
    SUM,
    TOP_K,
    TOP_P,
    float_word,
    order_key,
)

PIVOTS = tl.constexpr(16)
UNIT = tl.constexpr(1 << 20)  # of SHARES, which are fixed-point numbers


@triton.jit
def pivot(i, scratch, best):
    """Key of pivot i (0..15), descending: 6 from the largest logit down to 2.4 deviations above the mean, 9 through the
    bulk, and the key of -inf."""
    count = tl.maximum(tl.load(scratch + COUNT).to(tl.float32), 1.0)
    mean = tl.load(scratch + SUM).to(tl.float32) / 65536.0 / count
    spread = tl.sqrt(tl.maximum(tl.load(scratch + SQUARES).to(tl.float32) / 65536.0 / count - mean * mean, 0.0))
    shoulder = tl.minimum(mean + 2.4 * spread, best)
    head = tl.maximum(best - (best - shoulder) * (i + 1).to(tl.float32) / 6.0, shoulder)
    bulk = tl.minimum(mean + (2.4 - 0.42 * (i - 5).to(tl.float32)) * spread, best)
    return tl.where(i == PIVOTS - 1, LEAST_KEY, order_key(tl.where(i < 6, head, bulk)))


@triton.jit
def no_measures(THREADS: tl.constexpr, dtype: tl.constexpr):
    """A tuple of one zero (THREADS,) per pivot."""
    zero = tl.zeros((THREADS,), dtype)
    zeros = tl.tuple(())
    for _ in tl.static_range(PIVOTS):
        zeros += (zero,)
    return zeros


@triton.jit
def measure(x, value, pivots, sums, THREADS: tl.constexpr):
    """Adds to each of `sums` the values (TILE,) of the logits at or above its pivot, in the thread that holds them."""
    EACH: tl.constexpr = x.shape[0] // THREADS
    x = tl.reshape(x, (THREADS, EACH))
    value = tl.reshape(value, (THREADS, EACH))
    added = tl.tuple(())
    for p in tl.static_range(PIVOTS):
        added += (sums[p] + tl.sum(tl.where(x >= pivots[p], value, 0), 1),)
    return added


@triton.jit
def totals(sums):
    """(PIVOTS,): each of the tuple `sums` over all threads."""
    pairs = tl.tuple(())
    for p in tl.static_range(8):
        pairs += (tl.join(sums[p], sums[p + 8]),)
    fours = tl.tuple(())
    for p in tl.static_range(4):
        fours += (tl.join(pairs[p], pairs[p + 4]),)
    joined = tl.join(tl.join(fours[0], fours[2]), tl.join(fours[1], fours[3]))
    return tl.sum(tl.reshape(joined, (sums[0].shape[0], PIVOTS)), 0)


@triton.jit
def pick(values, at):
    """values[at] of a vector (PIVOTS,); 0 where there is no such entry."""
    return tl.sum(tl.where(tl.arange(0, PIVOTS) == at, values, 0), 0)


@triton.jit
def mass_target(top_p, total):
    """ceil(top_p * total), at least 1."""
    exact = top_p * total.to(tl.float64)
    target = exact.to(tl.int64)
    return tl.maximum(target + (target.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def bracket(record, scratch, best):
    """(low, high, count from high on): low <= threshold < high, as far as the pivots can tell; the count is of top-k alone.

    With both top-k and top-p the interval reaches to the top: the second threshold is searched among the same keys.
    """
    p = tl.arange(0, PIVOTS)
    pivots = pivot(p, scratch, best).to(tl.int64)
    shares = tl.load(scratch + SHARES + p)
    top_k = tl.load(record + TOP_K)
    top_p = float_word(record, TOP_P)
    total = pick(shares, PIVOTS - 1)
    target = tl.where(top_k > 0, top_k * UNIT, (top_p * total.to(tl.float64)).to(tl.int64))
    at = tl.minimum(tl.sum((shares < target).to(tl.int32), 0), PIVOTS - 1)
    closed = (at > 0) & ((top_k == 0) | (top_p >= 1.0))
    high = tl.where(closed, pick(pivots, at - 1), order_key(best).to(tl.int64) + 1)
    return pick(pivots, at), high, tl.where(closed, pick(shares, at - 1) // UNIT, 0)
