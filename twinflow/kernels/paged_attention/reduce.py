"""Puts the parts of one-query attention together, in Triton: parts of a sequence's own keys and of its prefixes."""

import triton
import triton.language as tl

from twinflow.kernels.dependent_launch import let_next_start, wait_for_previous
from twinflow.kernels.paged_attention.pieces import pair_tiles, prefix_shares
from twinflow.kernels.triton_tools import sigmoid


@triton.jit(
    do_not_specialize=["sequences"], do_not_specialize_on_alignment=["own_starts", "places", "members", "prefixes"]
)
def reduce_parts(
    partial,
    lse,
    prefix_partial,
    prefix_lse,
    context_lens,
    cu_seqlens,
    own_starts,
    places,
    members,
    prefixes,
    gate,
    out,
    gate_stride,
    sequences,
    programs,
    prefix_programs,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ALL_ONE: tl.constexpr,
    GATED: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
    DEPTH: tl.constexpr,
    PREFIXES: tl.constexpr,
    PREFIX_ROWS: tl.constexpr,
    PREFIX_TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One head of one sequence: weighs its parts by the mass of their softmax. Sequences without keys get 0."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    token = seq
    mine_to_do = True
    if not ALL_ONE:
        token = tl.load(cu_seqlens + seq)
        mine_to_do = tl.load(cu_seqlens + seq + 1) - token == 1
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = head // GROUP
    tiles = pair_tiles(context_lens, own_starts, cu_seqlens, sequences, SEQUENCES, TILE, ALL_ONE, SHARED)
    index = tl.arange(0, SEQUENCES)
    piece = tl.maximum(tl.cdiv(tl.sum(tiles, 0) * KV_HEADS, programs), 1)
    mine = tl.sum(tl.where(index == seq, tiles, 0), 0)
    begin = tl.sum(tl.where(index < seq, tiles, 0), 0) * KV_HEADS + kv_head * mine
    first = begin // piece
    last = (begin + mine - 1) // piece
    whole = first == last
    has_prefix = False
    if SHARED:
        has_prefix = tl.load(own_starts + seq) > 0
    # Up to here only lengths are read, which the kernel before does not write. All programs wait, also those with nothing
    # to do, so that this kernel never ends before the one before it.
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    if (not mine_to_do) | ((mine > 0) & whole & (not has_prefix)):
        return
    if mine == 0:
        last = first - 1
    col = tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for program in range(first, last + 1, AT_ONCE):
        p = program + tl.arange(0, AT_ONCE)
        slot = 2 * p + (p == first)
        if SHARED:
            slot = tl.where(whole, 2 * programs + seq * KV_HEADS + kv_head, slot)
        row = slot * GROUP + head % GROUP
        acc, top, total = _add(partial, lse, row, p <= last, acc, top, total, col, DIM)
    if SHARED:
        begins, row_tiles, chunks, bases = prefix_shares(
            prefixes, prefix_programs, PREFIXES, PREFIX_ROWS // GROUP, KV_HEADS, BLOCK_TOKENS, PREFIX_TILE
        )
        which = tl.arange(0, PREFIXES)
        place = tl.load(places + seq)
        for j in range(DEPTH):
            prefix = tl.load(members + seq * DEPTH + j)
            mine_too = which == prefix
            count = tl.sum(tl.where(mine_too, chunks, 0), 0)
            row_tile_count = tl.sum(tl.where(mine_too, row_tiles, 0), 0)
            inside = place - tl.sum(tl.where(mine_too, begins, 0), 0)
            unit = tl.sum(tl.where(mine_too, bases, 0), 0) + kv_head * count * row_tile_count
            unit += inside // (PREFIX_ROWS // GROUP)
            row_in_tile = inside % (PREFIX_ROWS // GROUP) * GROUP + head % GROUP
            for chunk in range(0, count, AT_ONCE):
                c = chunk + tl.arange(0, AT_ONCE)
                row = (unit + c * row_tile_count) * PREFIX_ROWS + row_in_tile
                acc, top, total = _add(prefix_partial, prefix_lse, row, c < count, acc, top, total, col, DIM)
    y = acc / tl.where(total > 0.0, total, 1.0)
    at = token.to(tl.int64) * HEADS * DIM + head * DIM + col
    if GATED:
        z = tl.load(gate + token.to(tl.int64) * gate_stride + head * DIM + col, mask=col < DIM, other=0.0)
        y = y * sigmoid(z.to(tl.float32))
    tl.store(out + at, y.to(out.dtype.element_ty), mask=col < DIM)


@triton.jit
def _add(partial, lse, row, live, acc, top, total, col, DIM: tl.constexpr):
    """Parts in rows `row` (n,) of the partial results, merged into acc (WIDTH,), top, total."""
    mass = tl.load(lse + row, mask=live, other=float("-inf"))
    new_top = tl.maximum(top, tl.max(mass, 0))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(mass - base)
    shrink = tl.exp2(top - base)
    at = row.to(tl.int64)[:, None] * DIM + col[None, :]
    part = tl.load(partial + at, mask=(col < DIM)[None, :] & (weight > 0.0)[:, None], other=0.0)
    return acc * shrink + tl.sum(part * weight[:, None], 0), new_top, total * shrink + tl.sum(weight, 0)
