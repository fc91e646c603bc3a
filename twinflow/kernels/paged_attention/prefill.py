"""Paged attention for prompts, chunks of prompts and extensions of a context, in Triton.

A program takes a block of consecutive queries of one sequence together with all the query heads of one kv head, as one
tall tile, so that a short extension still fills it. Keys that every row sees are not masked. Where that makes few programs
(a short extension of a long context), each block's keys are split over several, and their parts put together afterwards.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twinflow.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from twinflow.kernels.paged_attention.tile import attend_tile, attend_tiles, mass_of, page_of, tall_tile, tiled
from twinflow.kernels.triton_tools import (
    find_sequence,
    multiprocessors,
    power_of_2,
    shared_bytes,
    sigmoid,
)

REDUCED_ROWS = tl.constexpr(16)  # rows that a program of the reduction takes
MOST_SPLITS = 16
PARTS_BYTES = 128 << 20  # of memory for what splits leave to be put together


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Rows (queries times heads of a kv head) and keys of a tile, warps, loads ahead, and how many programs share the keys
    of a block."""

    rows: int
    tile: int
    warps: int
    stages: int
    splits: int


def launch_options(q: torch.Tensor, kv_heads: int, lens: tuple[int, ...]) -> LaunchOptions:
    """By the number of programs with work, `lens` being how many queries the sequences have that have more than one."""
    _, heads, dim = q.shape
    processors, group = multiprocessors(q.device), heads // kv_heads
    programs = kv_heads * sum(triton.cdiv(n * group, 128) for n in lens)
    if q.dtype == torch.float32:
        rows, tile, warps, stages = 32, 32, 4, 1
    elif programs > processors:
        rows, warps = 128, 8
        tile, stages = tall_tile(q.device, dim)
    else:
        rows, tile, warps, stages = 64, 32, 4, 3 if shared_bytes(q.device) >= 140 << 10 or dim <= 128 else 2
    rows = max(rows, power_of_2(group))
    programs = max(1, kv_heads * sum(triton.cdiv(n * group, rows) for n in lens))
    splits = 1 << (min(MOST_SPLITS, max(1, processors // programs)).bit_length() - 1)
    return LaunchOptions(rows, tile, warps, stages, splits)


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
    lens: tuple[int, ...],
    gate: torch.Tensor | None = None,
    options: LaunchOptions | None = None,
    described: bool = True,
) -> None:
    """Writes `out` (T, H, D) for the sequences with more than one query. Arguments as in `paged_attention`; `lens`: their
    queries, which only guide how the work is divided; options, described: tuning."""
    tokens, heads, dim = q.shape
    sequences, kv_heads = block_tables.shape[0], k_cache.shape[1]
    group = heads // kv_heads
    options = options or launch_options(q, kv_heads, lens)
    rows = options.rows
    size = rows // group
    blocks = tokens // size + sequences
    fit = max(1, PARTS_BYTES // (blocks * kv_heads * rows * dim * 4))
    splits = min(options.splits, 1 << (fit.bit_length() - 1))  # a power of two: each number of splits is compiled
    cache = tiled(k_cache, v_cache, options.tile, described=described)
    gates, gate_stride = (q, 0) if gate is None else (gate, gate.stride(0))
    early = dependent_launch(q.device)
    partial = lse = out
    if splits > 1:
        partial = torch.empty(blocks * kv_heads * splits, rows, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(blocks * kv_heads * splits, rows, dtype=torch.float32, device=q.device)
    common = {
        "HEADS": heads,
        "GROUP": group,
        "SIZE": size,
        "ROWS": rows,
        "SPLITS": splits,
        "GATED": gate is not None,
        "EARLY": early,
        "launch_pdl": early,
    }
    _attend[(splits, blocks, kv_heads)](
        q,
        cache.keys,
        cache.values,
        block_tables,
        context_lens,
        cu_seqlens,
        gates,
        out,
        partial,
        lse,
        q.stride(0),
        block_tables.stride(0),
        gate_stride,
        sequences,
        scale * math.log2(math.e),
        num_warps=options.warps,
        num_stages=options.stages,
        **cache.constants,
        **common,
    )
    if splits > 1:
        grid = (rows // REDUCED_ROWS, blocks, kv_heads)
        shape = {"DIM": dim, "WIDTH": power_of_2(dim), "num_warps": 4}
        _reduce[grid](partial, lse, cu_seqlens, gates, out, gate_stride, sequences, **shape, **common)


@triton.jit
def _block_of(cu_seqlens, sequences, SIZE: tl.constexpr):
    """Which sequence this program serves, its first token, how many queries it has, and which is the block's first. Late
    blocks have the most keys; they start first so that none of them runs alone at the end."""
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = find_sequence(cu_seqlens, sequences, block, SIZE)
    start = tl.load(cu_seqlens + seq)
    return seq, start, tl.load(cu_seqlens + seq + 1) - start, (block - start // SIZE - seq) * SIZE


@triton.jit
def _store(
    out, y, token, head, col, inside, gate, gate_stride, HEADS: tl.constexpr, DIM: tl.constexpr, GATED: tl.constexpr
):
    """Rows y (M, WIDTH) fp32 of tokens and heads (M,), times the sigmoid of their gates."""
    if GATED:
        at_gate = (token * gate_stride + head * DIM)[:, None] + col[None, :]
        y = y * sigmoid(tl.load(gate + at_gate, mask=inside, other=0.0).to(tl.float32))
    at = (token * (HEADS * DIM) + head * DIM)[:, None] + col[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


# Where a launch takes a part of a batch, its pointers begin anywhere; nothing is compiled anew for that.
@triton.jit(
    do_not_specialize=["sequences", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "cu_seqlens"],
)
def _attend(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    cu_seqlens,
    gate,
    out,
    partial,
    lse,
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
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    split = tl.program_id(0)
    kv_head = tl.program_id(2)
    seq, start, queries, first_query = _block_of(cu_seqlens, sequences, SIZE)
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
    end = tl.maximum(tl.minimum(context, past + first_query + SIZE), 0)
    seen_by_all = tl.maximum(0, tl.minimum(context, past + first_query + 1)) // TILE * TILE
    low = 0
    if SPLITS > 1:
        tiles = tl.cdiv(end, TILE)
        low = split * tiles // SPLITS * TILE
        end = tl.minimum((split + 1) * tiles // SPLITS * TILE, end)
        seen_by_all = tl.maximum(tl.minimum(seen_by_all, end // TILE * TILE), low)
    acc, top, total = attend_tiles(
        query, acc, top, total, k_cache, v_cache, table, kv_head, low, seen_by_all, context, last_key, scale_log2,
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
    if SPLITS == 1:
        _store(out, y, token, head, col, inside, gate, gate_stride, HEADS, DIM, GATED)
    else:
        unit = (tl.program_id(1) * tl.num_programs(2) + kv_head) * SPLITS + split
        at = unit * ROWS + row
        tl.store(partial + at.to(tl.int64)[:, None] * DIM + col[None, :], y, mask=inside)
        tl.store(lse + at, mass_of(top, total))


@triton.jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=["cu_seqlens"])
def _reduce(
    partial,
    lse,
    cu_seqlens,
    gate,
    out,
    gate_stride,
    sequences,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some rows of a block: weighs their parts by the mass of their softmax."""
    _, start, queries, first_query = _block_of(cu_seqlens, sequences, SIZE)
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    kv_head = tl.program_id(2)
    row = tl.program_id(0) * REDUCED_ROWS + tl.arange(0, REDUCED_ROWS)
    query_of_row = first_query + row // GROUP
    live = (row < SIZE * GROUP) & (query_of_row < queries)
    if (tl.max(live.to(tl.int32), 0) == 0) | (queries == 1):
        return
    col = tl.arange(0, WIDTH)
    inside = live[:, None] & (col < DIM)[None, :]
    acc = tl.zeros([REDUCED_ROWS, WIDTH], tl.float32)
    top = tl.full([REDUCED_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([REDUCED_ROWS], tl.float32)
    for split in range(SPLITS):
        at = ((tl.program_id(1) * tl.num_programs(2) + kv_head) * SPLITS + split) * ROWS + row
        mass = tl.load(lse + at, mask=live, other=float("-inf"))
        part = tl.load(partial + at.to(tl.int64)[:, None] * DIM + col[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, mass)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, shrink = tl.exp2(mass - base), tl.exp2(top - base)
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        top = new_top
    y = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    token = (start + query_of_row).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    _store(out, y, token, head, col, inside, gate, gate_stride, HEADS, DIM, GATED)
