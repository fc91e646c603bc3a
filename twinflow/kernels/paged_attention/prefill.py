"""Paged attention for prompts, chunks of prompts and extensions of a context, in Triton.

A program takes a block of consecutive queries of one sequence together with all the query heads of one kv head, as one
tall tile, so that a short extension still fills it. Keys that every row sees are not masked.
"""

import math

import torch
import triton
import triton.language as tl

from twinflow.kernels.paged_attention.tile import attend_tile
from twinflow.kernels.triton_tools import dot_precision, find_sequence, power_of_2, shared_bytes


def attend_many_queries(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    rows: int = 128,
    tile: int = 64,
    warps: int = 8,
    stages: int | None = None,
) -> None:
    """Writes `out` (T, H, D) for the sequences with more than one query. rows, tile, warps, stages: tuning."""
    tokens, heads, dim = q.shape
    sequences, kv_heads, block_tokens = block_tables.shape[0], k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    if q.dtype == torch.float32:
        rows, tile, warps, stages = 32, 32, 4, 1
    if stages is None:
        stages = 2 if shared_bytes(q.device) >= 200 << 10 or dim <= 128 else 1
    rows = max(rows, power_of_2(group))
    size = rows // group
    _attend[(tokens // size + sequences, kv_heads)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        cu_seqlens,
        out,
        q.stride(0),
        block_tables.stride(0),
        sequences,
        scale * math.log2(math.e),
        PAGE_STRIDE=k_cache.stride(0),
        HEAD_STRIDE=k_cache.stride(1),
        TOKEN_STRIDE=k_cache.stride(2),
        BLOCK_TOKENS=block_tokens,
        HEADS=heads,
        GROUP=group,
        SIZE=size,
        ROWS=rows,
        DIM=dim,
        WIDTH=power_of_2(dim),
        TILE=min(tile, power_of_2(block_tokens)),
        PRECISION=dot_precision(q.dtype),
        num_warps=warps,
        num_stages=stages,
    )


@triton.jit(do_not_specialize=["sequences"])
def _attend(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    cu_seqlens,
    out,
    q_stride,
    table_stride,
    sequences,
    scale_log2,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Late blocks have the most keys; they start first so that none of them runs alone at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_sequence(cu_seqlens, sequences, block, SIZE)
    start = tl.load(cu_seqlens + seq)
    queries = tl.load(cu_seqlens + seq + 1) - start
    first_query = (block - start // SIZE - seq) * SIZE
    if (first_query >= queries) | (queries == 1):
        return
    context = tl.load(context_lens + seq)
    past = context - queries
    row = tl.arange(0, ROWS)
    query_of_row = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = (row < SIZE * GROUP) & (query_of_row < queries)
    last_key = tl.where(live, past + query_of_row, -1)
    col = tl.arange(0, WIDTH)
    inside = live[:, None] & (col < DIM)[None, :]
    token = (start + query_of_row).to(tl.int64)
    query = tl.load(q + (token * q_stride + head * DIM)[:, None] + col[None, :], mask=inside, other=0.0)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride
    end = tl.minimum(context, past + first_query + SIZE)
    seen_by_all = tl.maximum(0, tl.minimum(context, past + first_query + 1)) // TILE * TILE
    for first in range(0, seen_by_all, TILE):
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
            False,
            PRECISION,
        )
    for first in range(seen_by_all, end, TILE):
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
    at = (token * (HEADS * DIM) + head * DIM)[:, None] + col[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
