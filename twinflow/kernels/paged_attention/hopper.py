"""Paged attention for prompts and chunks on Hopper, in Gluon (Triton's language for explicit placement): half types only.

A program serves the queries of `prefill.py`'s programs, 128 rows, but its warps have different jobs: one warp fetches tiles of
K and V ahead of their use, two groups of four warps each attend 64 rows. A group begins the scores of the next tile before the
softmax of this one, and multiplies weights and values beside it, so that the matrix unit does not wait for the softmax.
"""

import math
from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from twinflow.kernels.paged_attention.tile import can_describe, described_rows
from twinflow.kernels.triton_tools import multiprocessors

ROWS, TILE = 128, 64
STAGES = 2


def suits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lens: tuple[int, ...]) -> bool:
    """Whether this kernel can serve such tensors, and has enough to do: `lens` are the queries of the longer sequences."""
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    return (
        is_hopper(q.device)
        and q.dtype == k_cache.dtype
        and dim in (64, 128, 256)
        and group <= ROWS // 2
        and can_describe(k_cache, TILE)
        and can_describe(v_cache, TILE)
        and kv_heads * sum(-(-n * group // ROWS) for n in lens) > multiprocessors(q.device)
    )


@lru_cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


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
) -> None:
    """Writes `out` (T, H, D) for the sequences with more than one query. Arguments as in `paged_attention`."""
    tokens, heads, dim = q.shape
    sequences, kv_heads, block_tokens = block_tables.shape[0], k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    size = ROWS // 2 // group * 2
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    keys, values = (TensorDescriptor(c, described_rows(c), [dim, 1], [TILE, dim], layout) for c in (k_cache, v_cache))
    gates, gate_stride = (q, 0) if gate is None else (gate, gate.stride(0))
    _attend[(tokens // size + sequences, kv_heads)](
        q,
        keys,
        values,
        v_cache,
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
        BLOCK_TOKENS=block_tokens,
        HEADS=heads,
        GROUP=group,
        SIZE=size,
        DIM=dim,
        TILE=TILE,
        STAGES=STAGES,
        GATED=gate is not None,
        num_warps=4,
    )


@gluon.jit(do_not_specialize=["sequences"])
def _attend(
    q,
    keys,
    values,
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
    PAGE_STRIDE: gl.constexpr,
    HEAD_STRIDE: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    # Late blocks have the most keys; they start first so that none of them runs alone at the end.
    block = gl.num_programs(0) - 1 - gl.program_id(0)
    kv_head = gl.program_id(1)
    seq = _find_sequence(cu_seqlens, sequences, block, SIZE)
    start = gl.load(cu_seqlens + seq)
    queries = gl.load(cu_seqlens + seq + 1) - start
    first_query = (block - start // SIZE - seq) * SIZE
    if (first_query >= queries) | (queries == 1):
        return
    context = gl.load(context_lens + seq)
    past = context - queries
    table = block_tables + seq.to(gl.int64) * table_stride
    last_query = gl.minimum(first_query + SIZE, queries)
    tiles = gl.cdiv(gl.maximum(past + last_query, 0), TILE)
    kv_layout: gl.constexpr = keys.layout
    q_shared = gl.allocate_shared_memory(q.dtype.element_ty, [2, 64, DIM], kv_layout)
    k_shared = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, TILE, DIM], kv_layout)
    v_shared = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, TILE, DIM], kv_layout)
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=1)
        mbarrier.init(bars.index(2 * STAGES + i), count=2)
        mbarrier.init(bars.index(3 * STAGES + i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend_rows,
                (
                    q, q_shared, k_shared, v_shared, bars, gate, out, q_stride, gate_stride, scale_log2, tiles, past,
                    start, first_query, queries, kv_head, 0, HEADS, GROUP, SIZE // 2, DIM, TILE, STAGES, GATED,
                ),
            ),
            (
                _attend_rows,
                (
                    q, q_shared, k_shared, v_shared, bars, gate, out, q_stride, gate_stride, scale_log2, tiles, past,
                    start, first_query, queries, kv_head, 1, HEADS, GROUP, SIZE // 2, DIM, TILE, STAGES, GATED,
                ),
            ),
            (
                _fetch,
                (
                    keys, values, v_cache, k_shared, v_shared, bars, table, tiles, context, kv_head,
                    PAGE_STRIDE, HEAD_STRIDE, BLOCK_TOKENS, DIM, TILE, STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _find_sequence(cu_seqlens, sequences, block, SIZE: gl.constexpr):
    """As `triton_tools.find_sequence`."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if gl.load(cu_seqlens + middle) // SIZE + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@gluon.jit
def _fetch(
    keys,
    values,
    v_cache,
    k_shared,
    v_shared,
    bars,
    table,
    tiles,
    context,
    kv_head,
    PAGE_STRIDE: gl.constexpr,
    HEAD_STRIDE: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fetches the tiles one after the other, each as soon as both groups are done with what was in its place."""
    AT_ONCE: gl.constexpr = 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0])
    page = gl.load(table)
    for j in range(tiles):
        next_page = gl.load(table + (j + 1) * TILE // BLOCK_TOKENS, mask=j + 1 < tiles, other=-1)
        stage = j % STAGES
        free = (j // STAGES + 1) % 2
        inside = j * TILE % BLOCK_TOKENS
        at = gl.where(page >= 0, page * (PAGE_STRIDE // DIM) + kv_head * (HEAD_STRIDE // DIM) + inside, -TILE)
        mbarrier.wait(bars.index(2 * STAGES + stage), free)
        mbarrier.expect(bars.index(stage), TILE * DIM * 2)
        tma.async_copy_global_to_shared(keys, [at, 0], bars.index(stage), k_shared.index(stage))
        mbarrier.wait(bars.index(3 * STAGES + stage), free)
        if (j + 1) * TILE <= context:
            mbarrier.expect(bars.index(STAGES + stage), TILE * DIM * 2)
            tma.async_copy_global_to_shared(values, [at, 0], bars.index(STAGES + stage), v_shared.index(stage))
        else:
            # Memory beyond the context may hold anything, and its weight of 0 does not undo a NaN: zeros instead.
            base = v_cache + page.to(gl.int64) * PAGE_STRIDE + kv_head * HEAD_STRIDE + inside * DIM
            row = gl.arange(0, AT_ONCE, gl.SliceLayout(1, layout))
            col = gl.arange(0, DIM, gl.SliceLayout(0, layout))
            for i in gl.static_range(TILE // AT_ONCE):
                n = i * AT_ONCE + row
                there = (j * TILE + n < context) & (page >= 0)
                value = gl.load(
                    base + n[:, None] * DIM + col[None, :], mask=there[:, None] & (col < DIM)[None, :], other=0.0
                )
                v_shared.index(stage).slice(i * AT_ONCE, AT_ONCE).store(value)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(bars.index(STAGES + stage), count=1)
        page = next_page


@gluon.jit
def _let_go(bars, which):
    """This group of warps is done with what barrier `which` guards."""
    gl.thread_barrier()
    mbarrier.arrive(bars.index(which), count=1)


@gluon.jit
def _softmax(scores, top, total, scale_log2):
    """As `tile.absorb`, without the accumulator: weights, and by how much what was before shrinks."""
    new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
    # A row that has seen no key yet stays at -inf; 0 in its place keeps -inf - -inf out of the exponents.
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * scale_log2 - base[:, None])
    shrink = gl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _attend_rows(
    q,
    q_shared,
    k_shared,
    v_shared,
    bars,
    gate,
    out,
    q_stride,
    gate_stride,
    scale_log2,
    tiles,
    past,
    start,
    first_query,
    queries,
    kv_head,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Attends the 64 rows of SIZE queries, in the first or second half of the program's."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    IO: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    first = first_query + HALF * SIZE
    mine = q_shared.index(HALF)
    io_row = gl.arange(0, 64, gl.SliceLayout(1, IO))
    io_col = gl.arange(0, DIM, gl.SliceLayout(0, IO))
    io_live = (io_row < SIZE * GROUP) & (first + io_row // GROUP < queries)
    io_token = (start + first + io_row // GROUP).to(gl.int64)
    io_head = kv_head * GROUP + io_row % GROUP
    inside = io_live[:, None] & (io_col < DIM)[None, :]
    mine.store(gl.load(q + (io_token * q_stride + io_head * DIM)[:, None] + io_col[None, :], mask=inside, other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    row = gl.arange(0, 64, gl.SliceLayout(1, S))
    col = gl.arange(0, TILE, gl.SliceLayout(0, S))
    live = (row < SIZE * GROUP) & (first + row // GROUP < queries)
    last_key = gl.where(live, past + first + row // GROUP, -1)
    seen_by_all = gl.maximum(past + first + 1, 0) // TILE  # tiles
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))
    acc = gl.full([64, DIM], 0.0, gl.float32, OUT)
    none = gl.full([64, TILE], 0.0, gl.float32, S)
    if tiles > 0:
        mbarrier.wait(bars.index(0), 0)
        scores = warpgroup_mma(mine, k_shared.index(0).permute((1, 0)), none, use_acc=False)
        _let_go(bars, 2 * STAGES)
        if seen_by_all == 0:
            scores = gl.where(col[None, :] <= last_key[:, None], scores, float("-inf"))
        weights, shrink, top, total = _softmax(scores, top, total, scale_log2)
        weights = gl.convert_layout(weights.to(q.dtype.element_ty), P)
        mbarrier.wait(bars.index(1 % STAGES), 1 // STAGES, tiles > 1)
        for j in range(1, tiles):
            stage = j % STAGES
            before = (j - 1) % STAGES
            token = warpgroup_mma(mine, k_shared.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(bars.index(STAGES + before), (j - 1) // STAGES % 2)
            acc = warpgroup_mma(weights, v_shared.index(before), acc, is_async=True)
            scores = warpgroup_mma_wait(1, [token])
            _let_go(bars, 2 * STAGES + stage)
            if j >= seen_by_all:
                scores = gl.where(j * TILE + col[None, :] <= last_key[:, None], scores, float("-inf"))
            p, shrink, top, total = _softmax(scores, top, total, scale_log2)
            weights = gl.convert_layout(p.to(q.dtype.element_ty), P)
            # Waiting for the next keys here, in a loop of its own, also keeps the softmax in front of the wait for the product.
            mbarrier.wait(bars.index((j + 1) % STAGES), (j + 1) // STAGES % 2, j + 1 < tiles)
            acc, weights = warpgroup_mma_wait(0, [acc, weights])
            _let_go(bars, 3 * STAGES + before)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
        last = (tiles - 1) % STAGES
        mbarrier.wait(bars.index(STAGES + last), (tiles - 1) // STAGES % 2)
        acc = warpgroup_mma(weights, v_shared.index(last), acc)
    share = 1.0 / gl.where(total > 0.0, total, 1.0)
    y = acc * gl.convert_layout(share, gl.SliceLayout(1, OUT))[:, None]
    y = gl.convert_layout(y.to(out.dtype.element_ty), IO)
    if GATED:
        z = gl.load(gate + (io_token * gate_stride + io_head * DIM)[:, None] + io_col[None, :], mask=inside, other=0.0)
        y = (y.to(gl.float32) / (1.0 + gl.exp(-z.to(gl.float32)))).to(out.dtype.element_ty)
    gl.store(out + (io_token * (HEADS * DIM) + io_head * DIM)[:, None] + io_col[None, :], y, mask=inside)
