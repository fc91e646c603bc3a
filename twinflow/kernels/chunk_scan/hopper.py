"""The scan of corrected chunks (`triton.py`, with T) on compute capability 9.0, in Gluon: products are left running.

A chunk costs three products that wait for each other through the state, Y = S K^T, X = V^T T^T + Y T^T and S + X K, and three
that nothing waits for: V^T T^T, S Q^T and X M^T. Each of the latter runs while what one of the former gave is turned into an
operand, so that the matrix units have something in flight at nearly all times:

    Y, [V^T T^T], X, [S Q^T], S, [X M^T]

A warp of its own copies the operands into rings in shared memory, `AHEAD` chunks early; each other partition of four warps
owns TILE value dims. Once per chunk nothing is in flight: the assembler wants it before registers of the state are scaled.
"""

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

from twinflow.kernels.base import Snapshots
from twinflow.kernels.chunk_scan.triton import CHUNK_TOKENS, Chunks
from twinflow.kernels.triton_tools import multiprocessors

TILE = 64  # value dims of a partition: the rows of one matrix instruction
KEY_DIMS = 128
ALIGNMENT_BYTES = 16  # of what is copied by descriptor


def suits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `scan_corrected_chunks` takes such tensors, on a GPU where `runs_gluon`."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] == KEY_DIMS
        and v.shape[2] % TILE == 0
        and all(
            x.data_ptr() % ALIGNMENT_BYTES == x.stride(0) * x.element_size() % ALIGNMENT_BYTES == 0 for x in (q, k, v)
        )
    )


def scan_corrected_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunks: Chunks,
    out: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    cu_seqlens: torch.Tensor,
    snapshots: Snapshots | None = None,
    parts: int | None = None,
    ahead: int = 3,
) -> None:
    """As `triton.scan_chunks` with `chunks.solved` and without `skip`, for what `suits`. parts (1 or 2: partitions of a
    program), ahead (chunks in shared memory at a time): tuning."""
    assert chunks.solved is not None
    heads, v_dim, k_dim = state.shape[1:]
    if parts is None:
        # A lone prompt is a matter of latency; of many, programs with two parts read Q, K, T and M half as often.
        few = fresh.shape[0] * heads * (v_dim // TILE) <= multiprocessors(q.device)
        parts = 1 if few or v_dim % (2 * TILE) else 2
    square = [CHUNK_TOKENS, CHUNK_TOKENS]
    scan[(v_dim // (TILE * parts), heads, fresh.shape[0])](
        _rows(q, k_dim),
        _rows(k, k_dim),
        _rows(v, TILE),
        _descriptor(chunks.products.view(-1, CHUNK_TOKENS), square),
        _descriptor(chunks.solved.view(-1, CHUNK_TOKENS), square),
        _descriptor(chunks.factors.view(-1), [4 * CHUNK_TOKENS]),
        chunks.decays,
        out,
        state,
        state_rows,
        fresh,
        cu_seqlens,
        snapshots.starts if snapshots is not None else cu_seqlens,
        snapshots.after if snapshots is not None else cu_seqlens,
        snapshots.rows if snapshots is not None else state_rows,
        int(snapshots is not None),
        state.stride(0),
        HEADS=heads,
        GROUP=heads // q.shape[1],
        K=k_dim,
        V=v_dim,
        TILE=TILE,
        SIZE=CHUNK_TOKENS,
        PARTS=parts,
        AHEAD=ahead,
        num_warps=4,
    )


def _rows(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """Of (T, heads, dim), any token stride: blocks of a chunk's tokens and so many columns."""
    flat = x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))
    return _descriptor(flat, [CHUNK_TOKENS, columns])


def _descriptor(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    swizzled = 128 if len(block) > 1 else 0
    layout = gl.NVMMASharedLayout(swizzled, 8 * x.element_size(), len(block))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


@gluon.jit(do_not_specialize=["snapshots"])
def scan(
    q,  # descriptors from here ..
    k,
    v,
    products,
    solved,
    factors,  # .. to here
    decays,
    out,
    state,
    state_rows,
    fresh,
    cu_seqlens,
    snapshot_starts,
    snapshot_after,
    snapshot_rows,
    snapshots,
    state_stride,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    TILE: gl.constexpr,
    SIZE: gl.constexpr,
    PARTS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    head = gl.program_id(1)
    seq = gl.program_id(2)
    start = gl.load(cu_seqlens + seq)
    tokens = gl.load(cu_seqlens + seq + 1) - start
    if tokens <= 1:
        return
    dtype: gl.constexpr = k.dtype
    q_ring = gl.allocate_shared_memory(dtype, [AHEAD, SIZE, K], q.layout)
    k_ring = gl.allocate_shared_memory(dtype, [AHEAD, SIZE, K], k.layout)
    v_ring = gl.allocate_shared_memory(dtype, [AHEAD * PARTS, SIZE, TILE], v.layout)
    t_ring = gl.allocate_shared_memory(dtype, [AHEAD, SIZE, SIZE], solved.layout)
    m_ring = gl.allocate_shared_memory(dtype, [AHEAD, SIZE, SIZE], products.layout)
    f_ring = gl.allocate_shared_memory(gl.float32, [AHEAD, 4 * SIZE], factors.layout)
    staging = gl.allocate_shared_memory(dtype, [PARTS, SIZE, TILE], v.layout)
    filled = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(AHEAD):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(emptied.index(i), count=PARTS)
    fence_async_shared()
    block = start // SIZE + seq
    column = head * V + gl.program_id(0) * (PARTS * TILE)
    rings = (q_ring, k_ring, v_ring, t_ring, m_ring, f_ring, filled, emptied)
    results = (
        staging,
        decays,
        out,
        state,
        state_rows,
        fresh,
        snapshot_starts,
        snapshot_after,
        snapshot_rows,
        snapshots,
        state_stride,
    )
    place = (seq, start, tokens, block, head, column)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_compute, (rings, results, place, 0, HEADS, K, V, TILE, SIZE, PARTS, AHEAD)),
                (
                    _copy,
                    ((q, k, v, products, solved, factors), rings, place, HEADS, GROUP, K, TILE, SIZE, PARTS, AHEAD),
                ),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (rings, results, place, 0, HEADS, K, V, TILE, SIZE, PARTS, AHEAD)),
                (_compute, (rings, results, place, 1, HEADS, K, V, TILE, SIZE, PARTS, AHEAD)),
                (
                    _copy,
                    ((q, k, v, products, solved, factors), rings, place, HEADS, GROUP, K, TILE, SIZE, PARTS, AHEAD),
                ),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _copy(
    sources,
    rings,
    place,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    TILE: gl.constexpr,
    SIZE: gl.constexpr,
    PARTS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    q, k, v, products, solved, factors = sources
    q_ring, k_ring, v_ring, t_ring, m_ring, f_ring, filled, emptied = rings
    _, start, tokens, block, head, column = place
    # The factors' copy is a power of two and takes something of the next ones with it.
    BYTES: gl.constexpr = 2 * (2 * SIZE * K + SIZE * PARTS * TILE + 2 * SIZE * SIZE) + 4 * 4 * SIZE
    slot, phase = 0, 0
    at = block * HEADS + head
    for done in range(0, tokens, SIZE):
        mbarrier.wait(emptied.index(slot), phase ^ 1, pred=done >= AHEAD * SIZE)
        bar = filled.index(slot)
        mbarrier.expect(bar, BYTES)
        shared = (head // GROUP) * K
        tma.async_copy_global_to_shared(k, [start + done, shared], bar, k_ring.index(slot))
        for part in gl.static_range(PARTS):
            values = v_ring.index(slot * PARTS + part)
            tma.async_copy_global_to_shared(v, [start + done, column + part * TILE], bar, values)
        tma.async_copy_global_to_shared(solved, [at * SIZE, 0], bar, t_ring.index(slot))
        tma.async_copy_global_to_shared(factors, [at * 3 * SIZE], bar, f_ring.index(slot))
        tma.async_copy_global_to_shared(q, [start + done, shared], bar, q_ring.index(slot))
        tma.async_copy_global_to_shared(products, [at * SIZE, 0], bar, m_ring.index(slot))
        at += HEADS
        slot = gl.where(slot == AHEAD - 1, 0, slot + 1)
        phase = gl.where(slot == 0, phase ^ 1, phase)


@gluon.jit
def _compute(
    rings,
    results,
    place,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    TILE: gl.constexpr,
    SIZE: gl.constexpr,
    PARTS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    q_ring, k_ring, v_ring, t_ring, m_ring, f_ring, filled, emptied = rings
    (
        staging,
        decays,
        out,
        state,
        state_rows,
        fresh,
        snapshot_starts,
        snapshot_after,
        snapshot_rows,
        snapshots,
        state_stride,
    ) = results
    seq, start, tokens, block, head, column = place
    dtype: gl.constexpr = k_ring.dtype
    by_token: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    by_key: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left_of_token: gl.constexpr = gl.DotOperandLayout(0, by_token, 2)
    left_of_key: gl.constexpr = gl.DotOperandLayout(0, by_key, 2)
    per_token: gl.constexpr = gl.SliceLayout(0, by_token)
    staging = staging.index(PART)
    column += PART * TILE
    row = gl.load(state_rows + seq)
    known = (row >= 0) & (gl.load(fresh + seq) == 0)
    vc = gl.arange(0, TILE, layout=gl.SliceLayout(1, by_key))
    kc = gl.arange(0, K, layout=gl.SliceLayout(0, by_key))
    inside = (column + vc.to(gl.int64))[:, None] * K + kc.to(gl.int64)[None, :]
    s = gl.zeros([TILE, K], gl.float32, by_key)
    if known:
        s = gl.load(state + row * state_stride + inside).to(gl.float32)
    decays += block * HEADS + head
    decay = gl.load(decays)
    zeros = gl.zeros([TILE, SIZE], gl.float32, by_token)
    slot, phase, before = 0, 0, 0
    s_left = gl.convert_layout(s.to(dtype), left_of_token)
    o = zeros.to(dtype)
    mbarrier.wait(filled.index(0), 0)
    _zero_past_end(k_ring.index(0), v_ring.index(PART), tokens, SIZE, K, TILE)
    first_kept, kept = 0, 0
    if snapshots > 0:
        first_kept = gl.load(snapshot_starts + seq)
        kept = gl.load(snapshot_starts + seq + 1) - first_kept
    for part in range(kept + 1):
        begin, until, goal = 0, tokens, row
        if part > 0:
            begin = gl.load(snapshot_after + (first_kept + part - 1))
        if part < kept:
            until = gl.load(snapshot_after + first_kept + part)
            goal = gl.load(snapshot_rows + first_kept + part)
        for done in range(begin, until, SIZE):
            decays += HEADS
            next_decay = gl.load(decays, mask=tokens - done > SIZE, other=0.0)
            turn = t_ring.index(slot).permute((1, 0))
            values = v_ring.index(slot * PARTS + PART).permute((1, 0))
            y = warpgroup_mma(s_left, k_ring.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            x = warpgroup_mma(values, turn, zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(2, deps=(s,))
            # All warps are done with the chunk before, its operands and the place where outputs turn.
            gl.thread_barrier()
            mbarrier.arrive(emptied.index(before), pred=done > begin)
            staging.permute((1, 0)).store(o)
            gl.thread_barrier()
            s *= decay
            decay = next_decay
            y = warpgroup_mma_wait(1, deps=(y,))
            near = f_ring.index(slot).slice(2 * SIZE, SIZE).load(per_token)
            y = gl.convert_layout((y * near[None, :]).to(dtype), left_of_token)
            x = warpgroup_mma(y, turn, x, is_async=True)
            queried = warpgroup_mma(s_left, q_ring.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(1, deps=(x,))
            of_keys = f_ring.index(slot).slice(SIZE, SIZE).load(per_token)
            weighed = gl.convert_layout((x * of_keys[None, :]).to(dtype), left_of_key)
            s = warpgroup_mma(weighed, k_ring.index(slot), s, is_async=True)
            written = gl.convert_layout(x.to(dtype), left_of_token)
            if done > begin:
                _write(staging, out, start + done - SIZE, column, SIZE, HEADS * V, SIZE, TILE)
            queried = warpgroup_mma_wait(1, deps=(queried,))
            of_queries = f_ring.index(slot).slice(0, SIZE).load(per_token)
            m = m_ring.index(slot).permute((1, 0))
            o = warpgroup_mma(written, m, queried * of_queries[None, :], is_async=True)
            before = slot
            slot = gl.where(slot == AHEAD - 1, 0, slot + 1)
            phase = gl.where(slot == 0, phase ^ 1, phase)
            if tokens - done > SIZE:
                mbarrier.wait(filled.index(slot), phase)
                left = tokens - done - SIZE
                _zero_past_end(k_ring.index(slot), v_ring.index(slot * PARTS + PART), left, SIZE, K, TILE)
            s, o = warpgroup_mma_wait(0, deps=(s, o))
            s_left = gl.convert_layout(s.to(dtype), left_of_token)
            o = o.to(dtype)
        if begin < until:
            gl.thread_barrier()
            mbarrier.arrive(emptied.index(before))
            staging.permute((1, 0)).store(o)
            gl.thread_barrier()
            final = (until - 1) // SIZE * SIZE
            _write(staging, out, start + final, column, until - final, HEADS * V, SIZE, TILE)
        if goal >= 0:
            gl.store(state + goal * state_stride + inside, s.to(state.dtype.element_ty))


@gluon.jit
def _zero_past_end(keys, values, left, SIZE: gl.constexpr, K: gl.constexpr, TILE: gl.constexpr):
    """What a copy brought of the tokens after the sequence. Their T and M are zeros, but what is there may not be finite."""
    if left < SIZE:
        _zero_rows(values, left, SIZE, TILE)
        # Partitions share the keys: each zeroes them, in whatever order.
        _zero_rows(keys, left, SIZE, K)
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _zero_rows(place, left, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    x = place.load(layout)
    place.store(gl.where((token < left)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def _write(staging, out, token, column, left, ROW: gl.constexpr, SIZE: gl.constexpr, TILE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // TILE, TILE // 8], [4, 1], [1, 0])
    rows = gl.arange(0, SIZE, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    # In 64 bits, so that what the rows of a thread differ by goes into the instructions.
    place = (rows.to(gl.int64) + token)[:, None] * ROW + (columns.to(gl.int64) + column)[None, :]
    gl.store(out + place, staging.load(layout), mask=(rows < left)[:, None])
