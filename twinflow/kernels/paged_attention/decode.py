"""Paged attention for one query per sequence, in Triton: the keys of a sequence split over programs, then reduced.

Bound by reading K and V once. A program serves one kv head, so the query heads that share it share its reads.
"""

import math

import torch
import triton
import triton.language as tl

from twinflow.kernels.paged_attention.tile import attend_tile
from twinflow.kernels.triton_tools import dot_precision, multiprocessors, power_of_2

MAX_SPLITS = 64
SPLITS_AT_ONCE = 16  # partial results that the reduction holds in registers


def attend_one_query(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    all_one: bool,
    splits: int | None = None,
    tile: int = 64,
    warps: int = 4,
    stages: int = 2,
) -> None:
    """Writes `out` (T, H, D) for the sequences with exactly one query; `all_one`: all have. splits, tile, warps, stages:
    tuning; `splits` is chosen from the batch and the width of the tables when None."""
    _, heads, dim = q.shape
    sequences, kv_heads, block_tokens = block_tables.shape[0], k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    if q.dtype == torch.float32:
        tile, stages = 32, 1
    tile = min(tile, power_of_2(block_tokens))
    if splits is None:
        reachable = block_tables.shape[1] * block_tokens
        splits = choose_splits(sequences * kv_heads, reachable, tile, multiprocessors(q.device))
    partial = lse = out
    if splits > 1:
        partial = torch.empty(sequences, heads, splits, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(sequences, heads, splits, dtype=torch.float32, device=q.device)
    width = power_of_2(dim)
    _attend[(splits, kv_heads, sequences)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        cu_seqlens,
        out,
        partial,
        lse,
        q.stride(0),
        block_tables.stride(0),
        scale * math.log2(math.e),
        PAGE_STRIDE=k_cache.stride(0),
        HEAD_STRIDE=k_cache.stride(1),
        TOKEN_STRIDE=k_cache.stride(2),
        BLOCK_TOKENS=block_tokens,
        HEADS=heads,
        GROUP=group,
        ROWS=power_of_2(group),
        DIM=dim,
        WIDTH=width,
        TILE=tile,
        SPLITS=splits,
        ALL_ONE=all_one,
        PRECISION=dot_precision(q.dtype),
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        _reduce[(heads, sequences)](
            partial,
            lse,
            cu_seqlens,
            out,
            HEADS=heads,
            DIM=dim,
            WIDTH=width,
            SPLITS=splits,
            AT_ONCE=min(splits, SPLITS_AT_ONCE),
            ALL_ONE=all_one,
            num_warps=4,
        )


def choose_splits(programs: int, reachable_tokens: int, tile: int, processors: int) -> int:
    """A power of two: about four programs per multiprocessor, none with less than four tiles of the longest context."""
    wanted = max(1, 4 * processors // programs)
    useful = max(1, reachable_tokens // (4 * tile))
    return 1 << (min(wanted, useful, MAX_SPLITS).bit_length() - 1)


@triton.jit
def _attend(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    cu_seqlens,
    out,
    partial,
    lse,
    q_stride,
    table_stride,
    scale_log2,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_ONE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One part of the keys of one kv head of one sequence."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    token = seq
    if not ALL_ONE:
        token = tl.load(cu_seqlens + seq)
        if tl.load(cu_seqlens + seq + 1) - token != 1:
            return
    token = token.to(tl.int64)
    context = tl.load(context_lens + seq)
    part = tl.cdiv(tl.cdiv(context, TILE), SPLITS) * TILE
    low = split * part
    high = tl.minimum(low + part, context)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    inside = (row < GROUP)[:, None] & (col < DIM)[None, :]
    head = kv_head * GROUP + row
    query = tl.load(q + token * q_stride + head[:, None] * DIM + col[None, :], mask=inside, other=0.0)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    last_key = tl.zeros([ROWS], tl.int32) + context - 1
    table = block_tables + seq.to(tl.int64) * table_stride
    for first in range(low, high, TILE):
        acc, top, total = attend_tile(
            query,
            acc,
            top,
            total,
            k_cache,
            v_cache,
            table,
            kv_head * HEAD_STRIDE,
            first,
            context,
            last_key,
            scale_log2,
            PAGE_STRIDE,
            TOKEN_STRIDE,
            BLOCK_TOKENS,
            DIM,
            WIDTH,
            TILE,
            True,
            PRECISION,
        )
    y = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLITS == 1:
        at = token * HEADS * DIM + head[:, None] * DIM + col[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
    else:
        at = (seq.to(tl.int64) * HEADS + head) * SPLITS + split
        tl.store(partial + at[:, None] * DIM + col[None, :], y, mask=inside)
        seen = total > 0.0
        mass = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(lse + at, mass, mask=row < GROUP)


@triton.jit
def _reduce(
    partial,
    lse,
    cu_seqlens,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ALL_ONE: tl.constexpr,
):
    """Weighs the parts of one head of one sequence by the mass of their softmax."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    token = seq
    if not ALL_ONE:
        token = tl.load(cu_seqlens + seq)
        if tl.load(cu_seqlens + seq + 1) - token != 1:
            return
    base = (seq.to(tl.int64) * HEADS + head) * SPLITS
    masses = tl.load(lse + base + tl.arange(0, SPLITS))
    top = tl.max(masses, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(masses - top), 0)
    col = tl.arange(0, WIDTH)
    y = tl.zeros([WIDTH], tl.float32)
    for first in tl.static_range(0, SPLITS, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        weight = tl.exp2(tl.load(lse + base + split) - top)
        at = (base + split)[:, None] * DIM + col[None, :]
        part = tl.load(partial + at, mask=(col < DIM)[None, :] & (weight > 0.0)[:, None], other=0.0)
        y += tl.sum(part * weight[:, None], 0)
    y = y / tl.where(total > 0.0, total, 1.0)
    at = token.to(tl.int64) * HEADS * DIM + head * DIM + col
    tl.store(out + at, y.to(out.dtype.element_ty), mask=col < DIM)
