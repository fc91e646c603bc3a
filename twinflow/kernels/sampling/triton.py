"""Sampling on a GPU, in passes over the logits that are split over programs. Semantics: `reference.py`.

1. the largest logit and its lowest id; greedy rows are done · 2. (`threshold.py`) the least likely token that top-k and top-p
keep · 3. the mass of what is kept, per tile · 4. one program per row finds the tile and the token, and counts it.
Every sum is of integers, so a row's token does not depend on the number of programs it is split over.
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.sampling.logprobs import token_logprobs
from twinflow.kernels.sampling.row import (
    BEST,
    COUNT,
    COUNT_MASK,
    HISTORY,
    LOW_BITS,
    MIN_P,
    QUOTA,
    SCRATCH,
    SQUARES,
    SUM,
    THRESHOLD,
    WEIGHT_ONE,
    adjusted,
    best_value,
    float_word,
    has_threshold,
    is_drawn,
    key_value,
    open_row,
    order_key,
    splits_for,
    thread_sums,
    weight_scale,
    weights,
)
from twinflow.kernels.sampling.tables import BROKEN, NOTHING_LEFT, OK, Needs, RowTables
from twinflow.kernels.sampling.threshold import find_thresholds
from twinflow.kernels.triton_tools import power_of_2

__all__ = ["sample_tokens", "token_logprobs"]

_OK, _BROKEN, _NOTHING_LEFT = tl.constexpr(OK), tl.constexpr(BROKEN), tl.constexpr(NOTHING_LEFT)
_BEST_TILE, _BEST_WARPS, _BEST_PROGRAMS = 2048, 8, 8  # programs per multiprocessor
_TILE, _WARPS = 2048, 4


def sample_tokens(logits: torch.Tensor, tables: RowTables, steps: torch.Tensor, needs: Needs) -> torch.Tensor:
    n, vocab = logits.shape
    out = torch.empty(2, n, dtype=torch.int64, device=logits.device)
    if n == 0:
        return out
    scratch = torch.zeros(n, SCRATCH.value, dtype=torch.int64, device=logits.device)
    row_args = (logits, logits.stride(0), tables.records, tables.histories, tables.histories.stride(0), tables.edits)
    args = (*row_args, steps, scratch, n, vocab)
    common = {"ADJUSTS": needs.adjusts, "enable_fp_fusion": False}
    splits = splits_for(n, vocab, _BEST_TILE, _BEST_PROGRAMS, logits.device)
    _find_best[(n, splits)](
        *args, TILE=_BEST_TILE, THREADS=32 * _BEST_WARPS, MOMENTS=needs.thresholds, num_warps=_BEST_WARPS, **common
    )
    if needs.thresholds:
        find_thresholds(args, n, vocab, common, logits.device)
    masses = ties = scratch  # unused
    tiles = triton.cdiv(vocab, _TILE)
    width = power_of_2(tiles)
    if needs.draws:
        masses = torch.empty(n, width, dtype=torch.int64, device=logits.device)
        ties = torch.empty(n, width, dtype=torch.int32, device=logits.device)
        _weigh_tiles[(n, tiles)](*args, masses, ties, WIDTH=width, TILE=_TILE, num_warps=_WARPS, **common)
    _draw[(n,)](
        *args,
        masses,
        ties,
        out,
        WIDTH=width,
        TILE=_TILE,
        DRAWS=needs.draws,
        num_warps=_WARPS if needs.draws else 1,
        **common,
    )
    return out


@triton.jit(do_not_specialize=["n", "V"])
def _find_best(
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
    MOMENTS: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    """Grid (n, splits). Writes BEST, where NaN counts as +inf; with MOMENTS also the count, sum and sum of squares of the
    usual logits, roughly."""
    row = open_row(logits, stride, records, histories, history_stride, edits, steps, n, V)
    scratch += tl.program_id(0) * SCRATCH
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_start = tl.zeros((TILE,), tl.int32)
    count = tl.zeros((THREADS,), tl.float32)
    total = tl.zeros((THREADS,), tl.float32)
    squares = tl.zeros((THREADS,), tl.float32)
    for start in range(tl.program_id(1) * TILE, V, tl.num_programs(1) * TILE):
        x = adjusted(row, start, TILE, ADJUSTS)
        x = tl.where(x != x, float("inf"), x + 0.0)
        more = x > best
        best_start = tl.where(more, start, best_start)
        best = tl.where(more, x, best)
        if MOMENTS:
            usual = (x > -4096.0) & (x < 4096.0)
            y = tl.where(usual, x, 0.0)
            count += thread_sums(usual.to(tl.float32), THREADS)
            total += thread_sums(y, THREADS)
            squares += thread_sums(y * y, THREADS)
    id = best_start + tl.arange(0, TILE)
    packed = ((order_key(best).to(tl.int64) + (1 << 31)) << 31) | (id ^ LOW_BITS).to(tl.int64)
    tl.atomic_max(scratch + BEST, tl.max(packed, 0))
    if MOMENTS:
        tl.atomic_add(scratch + COUNT, tl.sum(count, 0).to(tl.int64))
        tl.atomic_add(scratch + SUM, (tl.sum(total, 0) * 65536.0).to(tl.int64))
        tl.atomic_add(scratch + SQUARES, (tl.sum(squares, 0) * 65536.0).to(tl.int64))


@triton.jit
def _limits(record, scratch):
    """(least logit, how many of those equal to it stay, least weight): what a row keeps."""
    least_weight = (float_word(record, MIN_P) * WEIGHT_ONE).to(tl.int64)
    asked = has_threshold(record)
    least = tl.where(asked, key_value(tl.load(scratch + THRESHOLD)), float("-inf"))
    return least, tl.where(asked, tl.load(scratch + QUOTA), 0), least_weight


@triton.jit(do_not_specialize=["n", "V"])
def _weigh_tiles(
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
    masses,
    ties,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    """Grid (n, tiles). Per tile: the mass above the threshold, and how many tokens lie on it."""
    row = open_row(logits, stride, records, histories, history_stride, edits, steps, n, V)
    record = row[0]
    i, tile = tl.program_id(0), tl.program_id(1)
    scratch += i * SCRATCH
    best = best_value(tl.load(scratch + BEST))
    if is_drawn(record, best):
        least, _, least_weight = _limits(record, scratch)
        x = adjusted(row, tile * TILE, TILE, ADJUSTS)
        weight = weights(x, best, weight_scale(record))
        tl.store(masses + i * WIDTH + tile, tl.sum(tl.where((x > least) & (weight >= least_weight), weight, 0), 0))
        tied = 0
        if has_threshold(record):
            tied = tl.sum((x == least).to(tl.int32), 0)
        tl.store(ties + i * WIDTH + tile, tied)


@triton.jit
def _find_tile(mass, tied, limits, best, scale, bits, WIDTH: tl.constexpr):
    """(tile, target, quota): where the cumulative mass passes the target, and what of target and quota is left for it.

    mass (WIDTH,) above the least logit per tile, tied tokens on it: these stay in vocabulary order until the quota is used up.
    """
    least, quota, least_weight = limits
    at = tl.arange(0, WIDTH)
    weight = weights(least, best, scale)
    stay = tl.minimum(tl.maximum(quota - (tl.cumsum(tied, 0) - tied), 0), tied)
    mass += tl.where(weight >= least_weight, stay * weight, 0)
    total = tl.sum(mass, 0)
    target = (bits.to(tl.float64) * (1.0 / (1 << 53)) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    tile = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    target -= tl.sum(tl.where(at < tile, mass, 0), 0)
    quota -= tl.sum(tl.where(at < tile, tied, 0), 0)
    return tile, target, quota


@triton.jit
def _find_token(x, weight, limits, quota, target):
    """The first entry of a tile at which the mass of what is kept passes `target`."""
    least, _, least_weight = limits
    tied = x == least
    stays = (x > least) | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= quota))
    mass = tl.cumsum(tl.where(stays & (weight >= least_weight), weight, 0), 0)
    return tl.sum((mass <= target).to(tl.int64), 0)


@triton.jit(do_not_specialize=["n", "V"])
def _draw(
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
    masses,
    ties,
    out,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    DRAWS: tl.constexpr,
    ADJUSTS: tl.constexpr,
):
    """Grid (n,). Writes token and outcome, and counts the token in the row's history."""
    row = open_row(logits, stride, records, histories, history_stride, edits, steps, n, V)
    record = row[0]
    i = tl.program_id(0)
    scratch += i * SCRATCH
    packed = tl.load(scratch + BEST)
    best = best_value(packed)
    token = (packed & LOW_BITS) ^ LOW_BITS
    if DRAWS:
        drawn = is_drawn(record, best)
        if drawn:
            bits = tl.load(steps + 2 * n + i)
            at = tl.arange(0, WIDTH)
            live = at < tl.cdiv(V, TILE)
            mass = tl.load(masses + i * WIDTH + at, mask=live, other=0)
            tied = tl.load(ties + i * WIDTH + at, mask=live, other=0).to(tl.int64)
            limits = _limits(record, scratch)
            scale = weight_scale(record)
            tile, target, quota = _find_tile(mass, tied, limits, best, scale, bits, WIDTH)
            x = adjusted(row, tile * TILE, TILE, ADJUSTS)
            token = tile * TILE + _find_token(x, weights(x, best, scale), limits, quota, target)
    outcome = tl.where(best == float("inf"), _BROKEN, tl.where(best == float("-inf"), _NOTHING_LEFT, _OK))
    token = tl.where(outcome == _OK, token, 0)
    tl.store(out + i, token)
    tl.store(out + n + i, outcome.to(tl.int64))
    if ADJUSTS:
        history = tl.load(record + HISTORY)
        if (history >= 0) & (outcome == _OK):
            entry = histories + history * history_stride + token
            seen = tl.load(entry)
            tl.store(entry, tl.where((seen & COUNT_MASK) == COUNT_MASK, seen, seen + 1))
