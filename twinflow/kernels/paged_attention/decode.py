"""Paged attention for one query per sequence, in Triton: the keys of all sequences divided evenly over a fixed grid.

Bound by reading K and V once. The tiles of all (sequence, kv head) pairs form one line, of which each program takes an equal
piece, by lengths that it reads on the device: long and short contexts balance, and tables wider than the contexts cost
nothing. A program serves the query heads that share a kv head together. Pairs that lie in one piece are finished at once;
`reduce.py` puts the others together.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twinflow.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from twinflow.kernels.paged_attention.pieces import pair_tiles
from twinflow.kernels.paged_attention.prefix import attend_prefixes
from twinflow.kernels.paged_attention.reduce import reduce_parts
from twinflow.kernels.paged_attention.shared import DEPTH, MOST_PREFIXES, SharedPrefixes
from twinflow.kernels.paged_attention.tile import attend_tile, attend_tiles, mass_of, page_of, tiled
from twinflow.kernels.triton_tools import multiprocessors, power_of_2, shared_bytes, sigmoid


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
    gate: torch.Tensor | None = None,
    shared: SharedPrefixes | None = None,
    programs: int | None = None,
    tile: int | None = None,
    warps: int = 4,
    stages: int | None = None,
    described: bool = True,
    early: bool | None = None,
) -> None:
    """Writes `out` (T, H, D) for the sequences with exactly one query; `all_one`: all have. Arguments as in
    `paged_attention`; programs, tile, warps, stages, described, early: tuning."""
    _, heads, dim = q.shape
    sequences, kv_heads = block_tables.shape[0], k_cache.shape[1]
    group, width = heads // kv_heads, power_of_2(dim)
    chosen = launch_options(q, width)
    cache = tiled(k_cache, v_cache, tile or chosen.tile, described=described)
    programs = programs or chosen.programs_each * multiprocessors(q.device)
    prefix = None
    if shared:
        prefix = attend_prefixes(q, k_cache, v_cache, block_tables, cu_seqlens, scale, shared, all_one=all_one)
    # Two places for each program; beside prefixes also one for each pair that a program does alone.
    places = 2 * programs + (sequences * kv_heads if shared else 0)
    partial = torch.empty(places, group, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(places, group, dtype=torch.float32, device=q.device)
    own_starts = shared.own_starts if shared else context_lens
    gates, gate_stride = (q, 0) if gate is None else (gate, gate.stride(0))
    if early is None:
        early = dependent_launch(q.device)
    common = {
        "HEADS": heads,
        "GROUP": group,
        "SEQUENCES": power_of_2(sequences),
        "ALL_ONE": all_one,
        "GATED": gate is not None,
        "SHARED": shared is not None,
        "EARLY": early,
        "launch_pdl": early,
    }
    _attend[(programs,)](
        q,
        cache.keys,
        cache.values,
        block_tables,
        context_lens,
        cu_seqlens,
        own_starts,
        gates,
        out,
        partial,
        lse,
        q.stride(0),
        block_tables.stride(0),
        gate_stride,
        sequences,
        scale * math.log2(math.e),
        ROWS=power_of_2(group),
        num_warps=warps,
        num_stages=stages or chosen.stages,
        **cache.constants,
        **common,
    )
    reduce_parts[(heads, sequences)](
        partial,
        lse,
        prefix.partial if prefix else partial,
        prefix.lse if prefix else lse,
        context_lens,
        cu_seqlens,
        own_starts,
        shared.places if shared else context_lens,
        shared.members if shared else context_lens,
        shared.prefixes if shared else context_lens,
        gates,
        out,
        gate_stride,
        sequences,
        programs,
        prefix.programs if prefix else 1,
        DEPTH=DEPTH,
        PREFIXES=MOST_PREFIXES,
        PREFIX_ROWS=prefix.rows if prefix else group,
        PREFIX_TILE=prefix.tile if prefix else cache.tile,
        DIM=dim,
        WIDTH=width,
        TILE=cache.tile,
        BLOCK_TOKENS=k_cache.shape[2],
        AT_ONCE=8,
        num_warps=2,
        **common,
    )


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    tile: int
    stages: int
    programs_each: int  # programs per multiprocessor


def launch_options(q: torch.Tensor, width: int) -> LaunchOptions:
    """Tiles and loads ahead that keep enough bytes on their way within the GPU's shared memory."""
    if q.dtype == torch.float32:
        return LaunchOptions(32, 1, 2)
    shared = shared_bytes(q.device) - (12 << 10)  # what a program needs besides the tiles on their way
    stages = 3
    bytes_per_token = 2 * (stages - 1) * width * q.element_size()
    tile = 64 if 64 * bytes_per_token <= shared else 32
    return LaunchOptions(tile, stages, max(1, min(4, shared // (tile * bytes_per_token))))


@triton.jit(do_not_specialize=["sequences", "table_stride"], do_not_specialize_on_alignment=["own_starts"])
def _attend(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    cu_seqlens,
    own_starts,
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
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ALL_ONE: tl.constexpr,
    GATED: tl.constexpr,
    SHARED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = pair_tiles(context_lens, own_starts, cu_seqlens, sequences, SEQUENCES, TILE, ALL_ONE, SHARED)
    ends = tl.cumsum(tiles, 0) * KV_HEADS
    line = tl.sum(tiles, 0) * KV_HEADS
    piece = tl.cdiv(line, programs)
    at = program * piece
    piece_end = tl.minimum(at + piece, line)
    index = tl.arange(0, SEQUENCES)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    inside = (row < GROUP)[:, None] & (col < DIM)[None, :]
    while at < piece_end:
        seq = tl.sum((ends <= at).to(tl.int32), 0)
        length = tl.sum(tl.where(index == seq, tiles, 0), 0)
        in_seq = at - (tl.sum(tl.where(index == seq, ends, 0), 0) - length * KV_HEADS)
        kv_head = in_seq // length
        low = in_seq % length
        high = tl.minimum(length, low + piece_end - at)
        at += high - low
        start = 0
        if SHARED:
            start = tl.load(own_starts + seq)
        context = tl.load(context_lens + seq)
        token = seq
        if not ALL_ONE:
            token = tl.load(cu_seqlens + seq)
        token = token.to(tl.int64)
        head = kv_head * GROUP + row
        query = tl.load(q + token * q_stride + head[:, None] * DIM + col[None, :], mask=inside, other=0.0)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        last_key = tl.zeros([ROWS], tl.int32) + context - 1
        table = block_tables + seq.to(tl.int64) * table_stride
        stop = tl.minimum(start + high * TILE, context)
        whole_stop = start + (stop - start) // TILE * TILE
        acc, top, total = attend_tiles(
            query, acc, top, total, k_cache, v_cache, table, kv_head, start + low * TILE, whole_stop, context, last_key,
            scale_log2, PAGE_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, BLOCK_TOKENS, DIM, WIDTH, TILE,
            BLOCK_TOKENS % TILE != 0, DESCRIBED, PRECISION,
        )  # fmt: skip
        if whole_stop < stop:
            page = page_of(table, whole_stop, stop, BLOCK_TOKENS, TILE)
            acc, top, total = attend_tile(
                query, acc, top, total, k_cache, v_cache, table, page, kv_head, whole_stop, context, last_key,
                scale_log2, PAGE_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, BLOCK_TOKENS, DIM, WIDTH, TILE, True, DESCRIBED,
                PRECISION,
            )  # fmt: skip
        y = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
        whole = high - low == length
        if whole & (start == 0):
            at_out = token * HEADS * DIM + head[:, None] * DIM + col[None, :]
            if GATED:
                z = tl.load(gate + token * gate_stride + head[:, None] * DIM + col[None, :], mask=inside, other=0.0)
                y = y * sigmoid(z.to(tl.float32))
            tl.store(out + at_out, y.to(out.dtype.element_ty), mask=inside)
        else:
            # Only the first pair of a piece can have begun in another, only the last can go on in another.
            slot = 2 * program + (low == 0)
            if whole:
                slot = 2 * programs + seq * KV_HEADS + kv_head
            tl.store(partial + (slot * GROUP + row)[:, None] * DIM + col[None, :], y, mask=inside)
            tl.store(lse + slot * GROUP + row, mass_of(top, total), mask=row < GROUP)
