"""Paged attention for prompts, chunks of prompts and extensions of a context, in Triton.

A program takes a block of consecutive queries of one sequence together with all the query heads of one kv head, as one
tall tile, so that a short extension still fills it. Keys that every row sees are not masked.
"""

import math

import torch
import triton
import triton.language as tl

from twinflow.kernels.paged_attention.tile import attend_tile, attend_tiles, attend_whole_tiles, page_of, tile_source
from twinflow.kernels.triton_tools import dot_precision, find_sequence, power_of_2, shared_bytes, sigmoid


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
    gate: torch.Tensor | None = None,
    rows: int = 128,
    tile: int = 64,
    warps: int = 8,
    stages: int | None = None,
    described: bool = True,
    ahead: bool = True,
) -> None:
    """Writes `out` (T, H, D) for the sequences with more than one query. Arguments as in `paged_attention`; rows, tile,
    warps, stages, described, ahead: tuning."""
    tokens, heads, dim = q.shape
    sequences, kv_heads, block_tokens = block_tables.shape[0], k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    if q.dtype == torch.float32:
        rows, tile, warps, stages, ahead = 32, 32, 4, 1, False
    if stages is None:
        stages = 2 if shared_bytes(q.device) >= 200 << 10 or dim <= 128 else 1
    rows = max(rows, power_of_2(group))
    size = rows // group
    tile = min(tile, power_of_2(block_tokens))
    keys, values, is_described = k_cache, v_cache, False
    if described:
        (keys, is_described), (values, _) = tile_source(k_cache, tile), tile_source(v_cache, tile)
    gates, gate_stride = (q, 0) if gate is None else (gate, gate.stride(0))
    _attend[(tokens // size + sequences, kv_heads)](
        q,
        keys,
        values,
        block_tables,
        context_lens,
        cu_seqlens,
        gates,
        out,
        q.stride(0),
        block_tables.stride(0),
        gate_stride,
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
        TILE=tile,
        GATED=gate is not None,
        DESCRIBED=is_described,
        AHEAD=ahead and block_tokens % tile == 0,
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
    gate,
    out,
    q_stride,
    table_stride,
    gate_stride,
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
    GATED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    AHEAD: tl.constexpr,
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
    if AHEAD:
        acc, top, total = attend_whole_tiles(
            query, acc, top, total, k_cache, v_cache, table, kv_head, 0, seen_by_all, scale_log2,
            PAGE_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, BLOCK_TOKENS, DIM, WIDTH, TILE, DESCRIBED, PRECISION,
        )  # fmt: skip
    else:
        acc, top, total = attend_tiles(
            query, acc, top, total, k_cache, v_cache, table, kv_head, 0, seen_by_all, context, last_key, scale_log2,
            PAGE_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, BLOCK_TOKENS, DIM, WIDTH, TILE, BLOCK_TOKENS % TILE != 0, DESCRIBED,
            PRECISION,
        )  # fmt: skip
    for first in range(seen_by_all, end, TILE):
        page = page_of(table, first, end, BLOCK_TOKENS, TILE)
        acc, top, total = attend_tile(
            query, acc, top, total, k_cache, v_cache, table, page, kv_head, first, context, last_key, scale_log2,
            PAGE_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, BLOCK_TOKENS, DIM, WIDTH, TILE, True, DESCRIBED, PRECISION,
        )  # fmt: skip
    y = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    if GATED:
        at_gate = (token * gate_stride + head * DIM)[:, None] + col[None, :]
        y = y * sigmoid(tl.load(gate + at_gate, mask=inside, other=0.0).to(tl.float32))
    at = (token * (HEADS * DIM) + head * DIM)[:, None] + col[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
