"""Attention of all rows of a batch that share a prefix to its keys, in Triton: each key is read once for all of them.

The query heads of a kv head of many sequences make one tall tile, as in prefill, without a causal mask. What a row gets here
is a part like any other, which `reduce.py` merges with that of the row's own keys.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twinflow.kernels.paged_attention.pieces import prefix_shares
from twinflow.kernels.paged_attention.shared import DEPTH, MOST_PREFIXES, SharedPrefixes
from twinflow.kernels.paged_attention.tile import attend_tiles, mass_of, tall_tile, tiled
from twinflow.kernels.triton_tools import multiprocessors, power_of_2


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """Results of units (`pieces.prefix_shares`): partial (units, rows, D) fp32, normalised, and lse (units, rows), base 2;
    `tile` keys at a time; the units were dealt out to `programs`."""

    partial: torch.Tensor
    lse: torch.Tensor
    rows: int
    tile: int
    programs: int


def attend_prefixes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    shared: SharedPrefixes,
    *,
    all_one: bool,
    rows: int | None = None,
) -> PrefixParts:
    """The parts of the rows in `shared`. Arguments as in `attend_one_query`; rows: tuning."""
    _, heads, dim = q.shape
    sequences, kv_heads = block_tables.shape[0], k_cache.shape[1]
    group = heads // kv_heads
    programs = multiprocessors(q.device)
    if q.dtype == torch.float32:
        rows, tile, warps, stages = 32, 32, 4, 1
    else:
        rows = rows or (128 if sequences * group > 64 else 64)
        warps = 8 if rows >= 128 else 4
        tile, stages = tall_tile(q.device, dim)
    rows = max(rows, power_of_2(group))
    cache = tiled(k_cache, v_cache, tile)
    at_once = rows // group
    units = programs + kv_heads * (MOST_PREFIXES + DEPTH * sequences // at_once)
    partial = torch.empty(units, rows, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(units, rows, dtype=torch.float32, device=q.device)
    _attend[(programs,)](
        q,
        cache.keys,
        cache.values,
        block_tables,
        cu_seqlens,
        shared.order,
        shared.prefixes,
        partial,
        lse,
        q.stride(0),
        block_tables.stride(0),
        scale * math.log2(math.e),
        KV_HEADS=kv_heads,
        GROUP=group,
        SIZE=at_once,
        ROWS=rows,
        PREFIXES=MOST_PREFIXES,
        ALL_ONE=all_one,
        num_warps=warps,
        num_stages=stages,
        **cache.constants,
    )
    return PrefixParts(partial, lse, rows, cache.tile, programs)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["order", "prefixes"])
def _attend(
    q,
    k_cache,
    v_cache,
    block_tables,
    cu_seqlens,
    order,
    prefixes,
    partial,
    lse,
    q_stride,
    table_stride,
    scale_log2,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PREFIXES: tl.constexpr,
    ALL_ONE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    programs = tl.num_programs(0)
    _, row_tiles, chunks, bases = prefix_shares(prefixes, programs, PREFIXES, SIZE, KV_HEADS, BLOCK_TOKENS, TILE)
    units = tl.sum(row_tiles * chunks, 0) * KV_HEADS
    which = tl.arange(0, PREFIXES)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    for unit in range(tl.program_id(0), units, programs):
        # Prefixes without rows come last, and with the same base as the end.
        prefix = tl.sum((bases <= unit).to(tl.int32), 0) - 1
        begin = tl.load(prefixes + prefix * 4)
        end = tl.load(prefixes + prefix * 4 + 1)
        first_key = tl.load(prefixes + prefix * 4 + 2) * BLOCK_TOKENS
        end_key = tl.load(prefixes + prefix * 4 + 3) * BLOCK_TOKENS
        mine = which == prefix
        count = tl.sum(tl.where(mine, row_tiles, 0), 0)
        parts = tl.sum(tl.where(mine, chunks, 0), 0)
        length = tl.cdiv(end_key - first_key, TILE)
        within = unit - tl.sum(tl.where(mine, bases, 0), 0)
        chunk = within // count % parts
        kv_head = within // count // parts
        low = chunk * length // parts
        high = (chunk + 1) * length // parts
        place = begin + within % count * SIZE + row // GROUP
        live = (place < end) & (row < SIZE * GROUP)
        seq = tl.load(order + place, mask=live, other=0)
        token = seq
        if not ALL_ONE:
            token = tl.load(cu_seqlens + seq, mask=live, other=0)
        head = kv_head * GROUP + row % GROUP
        at = token.to(tl.int64) * q_stride + head * DIM
        query = tl.load(q + at[:, None] + col[None, :], mask=live[:, None] & (col < DIM)[None, :], other=0.0)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        last_key = tl.zeros([ROWS], tl.int32) + 2147483647
        table = block_tables + tl.load(order + begin).to(tl.int64) * table_stride
        low_key, high_key = first_key + low * TILE, first_key + high * TILE
        acc, top, total = attend_tiles(
            query, acc, top, total, k_cache, v_cache, table, kv_head, low_key, high_key, end_key, last_key,
            scale_log2, PAGE_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, BLOCK_TOKENS, DIM, WIDTH, TILE,
            BLOCK_TOKENS % TILE != 0, DESCRIBED, PRECISION,
        )  # fmt: skip
        y = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
        place_out = unit * ROWS + row
        tl.store(
            partial + place_out.to(tl.int64)[:, None] * DIM + col[None, :], y, mask=live[:, None] & (col < DIM)[None, :]
        )
        tl.store(lse + place_out, mass_of(top, total), mask=live)
