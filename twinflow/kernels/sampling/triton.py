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
    NO_KEY,
    QUOTA,
    SCRATCH,
    SQUARES,
    SUM,
    TEMPERATURE,
    THRESHOLD,
    TOP_K,
    TOP_P,
    WEIGHT_ONE,
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
from twinflow.kernels.sampling.tables import BROKEN, NOTHING_LEFT, OK, Needs, RowTables
from twinflow.kernels.sampling.threshold import find_thresholds
from twinflow.kernels.triton_tools import multiprocessors, power_of_2

__all__ = ["sample_tokens", "token_logprobs"]

_TILE = 4096
_OK, _BROKEN, _NOTHING_LEFT = tl.constexpr(OK), tl.constexpr(BROKEN), tl.constexpr(NOTHING_LEFT)


def sample_tokens(logits: torch.Tensor, tables: RowTables, steps: torch.Tensor, needs: Needs) -> torch.Tensor:
    n, vocab = logits.shape
    out = torch.empty(2, n, dtype=torch.int64, device=logits.device)
    if n == 0:
        return out
    tiles = triton.cdiv(vocab, _TILE)
    scratch = torch.zeros(n, SCRATCH.value, dtype=torch.int64, device=logits.device)
    row_args = (logits, logits.stride(0), tables.records, tables.histories, tables.histories.stride(0), tables.edits)
    splits = min(tiles, max(1, 8 * multiprocessors(logits.device) // n))
    _find_best[(n, splits)](
        *row_args, steps, scratch, n, vocab, TILE=_TILE, MOMENTS=needs.thresholds, num_warps=8, enable_fp_fusion=False
    )
    if needs.thresholds:
        find_thresholds(row_args, steps, scratch, n, vocab)
    width = power_of_2(tiles)
    masses = torch.empty(n, width, dtype=torch.int64, device=logits.device)
    ties = torch.empty(n, width, dtype=torch.int32, device=logits.device)
    if needs.draws:
        _weigh_tiles[(n, tiles)](
            *row_args,
            steps,
            scratch,
            masses,
            ties,
            n,
            vocab,
            WIDTH=width,
            TILE=_TILE,
            num_warps=8,
            enable_fp_fusion=False,
        )
    _draw[(n,)](
        *row_args,
        steps,
        scratch,
        masses,
        ties,
        out,
        n,
        vocab,
        WIDTH=width,
        TILE=_TILE,
        DRAWS=needs.draws,
        num_warps=8,
        enable_fp_fusion=False,
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
    MOMENTS: tl.constexpr,
):
    """Grid (n, splits). Writes BEST; with MOMENTS also the count, sum and sum of squares of the logits, roughly."""
    i = tl.program_id(0)
    record = records + tl.load(steps + i) * WORDS
    position = tl.load(steps + n + i)
    base = logits + i.to(tl.int64) * stride
    best = tl.full((TILE,), float("-inf"), tl.float32)
    where = tl.zeros((TILE,), tl.int32)
    count = tl.zeros((TILE,), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    squares = tl.zeros((TILE,), tl.float32)
    for start in range(tl.program_id(1) * TILE, V, tl.num_programs(1) * TILE):
        x = adjusted(base, record, histories, history_stride, edits, position, start, V, TILE)
        where = tl.where(x > best, start + tl.arange(0, TILE), where)
        best = tl.maximum(x, best)
        if MOMENTS:
            usual = (x > -4096.0) & (x < 4096.0)
            y = tl.where(usual, x, 0.0)
            count += usual.to(tl.float32)
            total += y
            squares += y * y
    packed = ((order_key(best).to(tl.int64) + (1 << 31)) << 31) | (where ^ LOW_BITS).to(tl.int64)
    tl.atomic_max(scratch + i * SCRATCH + BEST, tl.max(packed, 0))
    if MOMENTS:
        tl.atomic_add(scratch + i * SCRATCH + COUNT, tl.sum(count, 0).to(tl.int64))
        tl.atomic_add(scratch + i * SCRATCH + SUM, (tl.sum(total, 0) * 65536.0).to(tl.int64))
        tl.atomic_add(scratch + i * SCRATCH + SQUARES, (tl.sum(squares, 0) * 65536.0).to(tl.int64))


@triton.jit
def _limits(record, scratch, has_threshold):
    """(threshold key, how many of its ties stay, least weight): what a row keeps."""
    least = (float_word(record, MIN_P) * WEIGHT_ONE).to(tl.int64)
    threshold = tl.load(scratch + THRESHOLD).to(tl.int32)
    return tl.where(has_threshold, threshold, NO_KEY), tl.where(has_threshold, tl.load(scratch + QUOTA), 0), least


@triton.jit
def _has_threshold(record):
    return (tl.load(record + TOP_K) > 0) | (float_word(record, TOP_P) < 1.0)


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
    masses,
    ties,
    n,
    V,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (n, tiles). Per tile: the mass above the threshold, and how many tokens lie on it."""
    i = tl.program_id(0)
    tile = tl.program_id(1)
    record = records + tl.load(steps + i) * WORDS
    best = best_value(tl.load(scratch + i * SCRATCH + BEST))
    if (float_word(record, TEMPERATURE) > 0.0) & is_drawable(best):
        threshold, _, least = _limits(record, scratch + i * SCRATCH, _has_threshold(record))
        position = tl.load(steps + n + i)
        start = tile * TILE
        x = adjusted(
            logits + i.to(tl.int64) * stride, record, histories, history_stride, edits, position, start, V, TILE
        )
        key = live_keys(x, start, V, TILE)
        weight = weights(x, best, weight_scale(record))
        tl.store(masses + i * WIDTH + tile, tl.sum(tl.where((key > threshold) & (weight >= least), weight, 0), 0))
        tl.store(ties + i * WIDTH + tile, tl.sum(((key == threshold) & (key != NO_KEY)).to(tl.int32), 0))


@triton.jit
def _find_tile(mass, tied, limits, best, scale, bits, WIDTH: tl.constexpr):
    """(tile, target, quota): where the cumulative mass passes the target, and what of target and quota is left for it.

    mass (WIDTH,) above the threshold per tile, tied tokens on it: these stay in vocabulary order until the quota is used up.
    """
    threshold, quota, least = limits
    at = tl.arange(0, WIDTH)
    weight = weights(key_value(tl.where(threshold == NO_KEY, order_key(best), threshold)), best, scale)
    stay = tl.minimum(tl.maximum(quota - (tl.cumsum(tied, 0) - tied), 0), tied)
    mass += tl.where(weight >= least, stay * weight, 0)
    total = tl.sum(mass, 0)
    target = (bits.to(tl.float64) * (1.0 / (1 << 53)) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    tile = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    target -= tl.sum(tl.where(at < tile, mass, 0), 0)
    quota -= tl.sum(tl.where(at < tile, tied, 0), 0)
    return tile, target, quota


@triton.jit
def _find_token(key, weight, limits, quota, target):
    """The first entry of a tile at which the mass of what is kept passes `target`."""
    threshold, _, least = limits
    tied = (key == threshold) & (key != NO_KEY)
    stays = (key > threshold) | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= quota))
    mass = tl.cumsum(tl.where(stays & (weight >= least), weight, 0), 0)
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
    masses,
    ties,
    out,
    n,
    V,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Grid (n,). Writes token and outcome, and counts the token in the row's history."""
    i = tl.program_id(0)
    record = records + tl.load(steps + i) * WORDS
    packed = tl.load(scratch + i * SCRATCH + BEST)
    best = best_value(packed)
    token = (packed & LOW_BITS) ^ LOW_BITS
    if DRAWS:
        drawn = (float_word(record, TEMPERATURE) > 0.0) & is_drawable(best)
        if drawn:
            position = tl.load(steps + n + i)
            bits = tl.load(steps + 2 * n + i)
            at = tl.arange(0, WIDTH)
            live = at < tl.cdiv(V, TILE)
            mass = tl.load(masses + i * WIDTH + at, mask=live, other=0)
            tied = tl.load(ties + i * WIDTH + at, mask=live, other=0).to(tl.int64)
            limits = _limits(record, scratch + i * SCRATCH, _has_threshold(record))
            scale = weight_scale(record)
            tile, target, quota = _find_tile(mass, tied, limits, best, scale, bits, WIDTH)
            base = logits + i.to(tl.int64) * stride
            x = adjusted(base, record, histories, history_stride, edits, position, tile * TILE, V, TILE)
            key = live_keys(x, tile * TILE, V, TILE)
            token = tile * TILE + _find_token(key, weights(x, best, scale), limits, quota, target)
    outcome = tl.where(best == float("inf"), _BROKEN, tl.where(best == float("-inf"), _NOTHING_LEFT, _OK))
    token = tl.where(outcome == _OK, token, 0)
    tl.store(out + i, token)
    tl.store(out + n + i, outcome.to(tl.int64))
    history = tl.load(record + HISTORY)
    if (history >= 0) & (outcome == _OK):
        entry = histories + history * history_stride + token
        seen = tl.load(entry)
        tl.store(entry, tl.where((seen & COUNT_MASK) == COUNT_MASK, seen, seen + 1))
