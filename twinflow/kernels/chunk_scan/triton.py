"""Carries a matrix state from chunk to chunk: what remains of a linear recurrence once its chunks are prepared.

Per head, with the chunk's rows Q, K, V, what a preparing kernel made of them in parallel (`Chunks`), and the state S (V, K):

    X = T (V + diag(near) K S^T), or X = V where nothing is corrected
    O = diag(queries) Q S^T + M X + skip V;   S <- decay S + X^T diag(keys) K

A program owns some value dims of one head of one sequence and walks through its chunks. Everything is computed transposed,
(value dims, tokens): then each product takes its left operand from the registers in which the product before left it, and
S never leaves them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twinflow.kernels.base import Snapshots
from twinflow.kernels.triton_tools import dot_precision, multiprocessors, power_of_2, shared_bytes

CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Chunks:
    """What the preparing kernel leaves for each block of tokens and head. Sequence s owns the blocks from number
    `cu_seqlens[s] // CHUNK_TOKENS + s` on; rows of tokens past its end are zeros. Blocks of sequences with one token are
    neither written nor read."""

    products: torch.Tensor  # M (blocks, H, tokens, tokens): scores against the tokens of the chunk, 0 from the token on
    solved: torch.Tensor | None  # T like M: turns what a token would write alone into what it writes after the others
    factors: torch.Tensor  # (blocks, H, 3, tokens) fp32: `queries`, `keys`, `near` (the last with T only)
    decays: torch.Tensor  # (blocks, H) fp32: decay over the chunk

    @classmethod
    def scratch(cls, tokens: int, sequences: int, heads: int, like: torch.Tensor, *, solved: bool) -> "Chunks":
        """Uninitialised tensors for a packed batch, matrices in the dtype of `like`."""
        shape = (tokens // CHUNK_TOKENS + sequences, heads)
        square = (*shape, CHUNK_TOKENS, CHUNK_TOKENS)
        return cls(
            products=like.new_empty(square),
            solved=like.new_empty(square) if solved else None,
            factors=like.new_empty((*shape, 3, CHUNK_TOKENS), dtype=torch.float32),
            decays=like.new_empty(shape, dtype=torch.float32),
        )


def scan_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunks: Chunks,
    skip: torch.Tensor | None,
    out: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    cu_seqlens: torch.Tensor,
    snapshots: Snapshots | None = None,
    value_tile: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> None:
    """Runs all sequences of more than one token; others are left alone.

    q, k (T, G, K), head h reads h // (H / G), v (T, H, V), any token stride; skip (H,) or None; out (T, H, V) contiguous,
    written; state (R, H, V, K), read and updated by row, -1 = start from zeros and store nothing; fresh (B,) bool;
    snapshots: more rows to write. value_tile, warps, stages: tuning; by the heads in flight and the GPU's shared memory
    when None.
    """
    _, heads, v_dim, k_dim = state.shape
    k_width = power_of_2(k_dim)
    tile = min(value_tile or _tile(fresh.shape[0] * heads, v_dim, q.device), power_of_2(v_dim))
    if warps is None:
        warps = 8 if tile >= 128 else 4
    if stages is None:
        stages = _stages(q, k_width, tile, chunks.solved is not None)
    _scan[(triton.cdiv(v_dim, tile), heads, fresh.shape[0])](
        q,
        k,
        v,
        chunks.products,
        chunks.solved if chunks.solved is not None else chunks.products,
        chunks.factors,
        chunks.decays,
        skip if skip is not None else chunks.decays,
        out,
        state,
        state_rows,
        fresh,
        cu_seqlens,
        snapshots.starts if snapshots is not None else cu_seqlens,
        snapshots.after if snapshots is not None else cu_seqlens,
        snapshots.rows if snapshots is not None else state_rows,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        state.stride(0),
        HEADS=heads,
        GROUP=heads // q.shape[1],
        K=k_dim,
        V=v_dim,
        K_WIDTH=k_width,
        TILE=tile,
        SIZE=CHUNK_TOKENS,
        SOLVED=chunks.solved is not None,
        SKIP=skip is not None,
        SNAPSHOTS=snapshots is not None,
        PRECISION=dot_precision(q.dtype),
        num_warps=warps,
        num_stages=stages,
    )


def _tile(heads: int, v_dim: int, device: torch.device) -> int:
    """Value dims of a program for so many heads of sequences: the narrowest with which all programs run at once, since a
    lone prompt is a matter of latency; else the widest, which reads Q, K, T and M least often. Measured on an H200."""
    widths = [tile for tile in (32, 64, 128) if heads * triton.cdiv(v_dim, tile) <= multiprocessors(device)]
    return widths[0] if widths else 128


def _stages(q: torch.Tensor, k_width: int, tile: int, solved: bool) -> int:
    """Chunks in shared memory at a time: three hide the way of the next one, two fit more programs, one fits anywhere."""
    row_bytes = q.element_size() * (2 * k_width + tile + (2 if solved else 1) * CHUNK_TOKENS)
    room = shared_bytes(q.device) - (16 << 10)  # beside what the output passes through on its way
    return max(1, min(3, room // (CHUNK_TOKENS * row_bytes)))


@triton.jit
def _scan(
    q,
    k,
    v,
    products,
    solved,
    factors,
    decays,
    skip,
    out,
    state,
    state_rows,
    fresh,
    cu_seqlens,
    snapshot_starts,
    snapshot_after,
    snapshot_rows,
    q_stride,
    k_stride,
    v_stride,
    state_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    SOLVED: tl.constexpr,
    SKIP: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1)
    seq = tl.program_id(2)
    start = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    if end - start <= 1:
        return
    row = tl.load(state_rows + seq)
    kc = tl.arange(0, K_WIDTH)
    vc = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = (head * V + vc[:, None]) * K + kc[None, :]
    inside = (vc < V)[:, None] & (kc < K)[None, :]
    known = inside & (row >= 0) & (tl.load(fresh + seq) == 0)
    s = tl.load(state + row * state_stride + place, mask=known, other=0.0).to(tl.float32)
    token = tl.arange(0, SIZE)
    square = token[:, None] * SIZE + token[None, :]
    # Offsets inside a chunk are the same for all of them: a chunk then costs one addition per address.
    shared = (head // GROUP) * K + kc  # columns of q and k
    own = head * V + vc  # columns of v and out
    in_q, in_k = token[:, None] * q_stride + shared[None, :], token[:, None] * k_stride + shared[None, :]
    in_v, in_out = token[:, None] * v_stride + own[None, :], token[:, None] * (HEADS * V) + own[None, :]
    first = start.to(tl.int64)
    q += first * q_stride
    k += first * k_stride
    v += first * v_stride
    out += first * (HEADS * V)
    at = ((start // SIZE + seq) * HEADS + head).to(tl.int64)
    products += at * SIZE * SIZE
    solved += at * SIZE * SIZE
    factors += at * 3 * SIZE
    decays += at
    of_queries = tl.load(factors + token)
    of_keys = tl.load(factors + SIZE + token)
    if SOLVED:
        near = tl.load(factors + 2 * SIZE + token)
    decay = tl.load(decays)
    # A part ends where a state is kept, the last one at the end. Its bounds come from its number alone: Triton 3.6 was seen
    # to take one carried around the loop for invariant.
    kept, tokens = 0, end - start
    if SNAPSHOTS:
        first_kept = tl.load(snapshot_starts + seq)
        kept = tl.load(snapshot_starts + seq + 1) - first_kept
    for part in range(kept + 1):
        begin, until, goal = 0, tokens, row
        if SNAPSHOTS:
            entry = first_kept + part
            begin = tl.load(snapshot_after + entry - 1, mask=part > 0, other=0)
            until = tl.load(snapshot_after + entry, mask=part < kept, other=tokens)
            goal = tl.load(snapshot_rows + entry, mask=part < kept, other=row)
        for done in range(begin, until, SIZE):
            left = tokens - done
            live, more = (token < left)[:, None], left > SIZE
            rows_k = live if K == K_WIDTH else live & (kc < K)[None, :]
            rows_v = live if V % TILE == 0 else live & (vc < V)[None, :]
            k_t = tl.load(k + in_k, mask=rows_k, other=0.0)
            q_t = tl.load(q + in_q, mask=rows_k, other=0.0)
            v_t = tl.load(v + in_v, mask=rows_v, other=0.0)
            m = tl.load(products + square)
            ahead = factors + HEADS * 3 * SIZE + token
            before = s.to(k_t.dtype)
            if SOLVED:
                turn = tl.trans(tl.load(solved + square))
                y = tl.dot(before, tl.trans(k_t), input_precision=PRECISION) * near[None, :]
                # Factors of the next chunk, on their way while this one is worked on.
                near = tl.load(ahead + 2 * SIZE, mask=more)
                # Not T (V + Y): V would have to change its layout for the sum, while a product takes it as it lies.
                x = tl.dot(tl.trans(v_t), turn, input_precision=PRECISION)
                x = tl.dot(y.to(k_t.dtype), turn, x, input_precision=PRECISION)
            else:
                x = tl.trans(v_t).to(tl.float32)
            o = tl.dot(before, tl.trans(q_t), input_precision=PRECISION) * of_queries[None, :]
            of_queries = tl.load(ahead, mask=more)
            o = tl.dot(x.to(m.dtype), tl.trans(m), o, input_precision=PRECISION)
            if SKIP:
                o += tl.load(skip + head).to(tl.float32) * x
            x *= of_keys[None, :]
            of_keys = tl.load(ahead + SIZE, mask=more)
            s = tl.dot(x.to(k_t.dtype), k_t, s * decay, input_precision=PRECISION)
            decay = tl.load(decays + HEADS, mask=more)
            o = tl.trans(o).to(out.dtype.element_ty)
            tl.store(out + in_out, o, mask=rows_v)
            q += SIZE * q_stride
            k += SIZE * k_stride
            v += SIZE * v_stride
            out += SIZE * HEADS * V
            products += HEADS * SIZE * SIZE
            solved += HEADS * SIZE * SIZE
            factors += HEADS * 3 * SIZE
            decays += HEADS
        tl.store(state + goal * state_stride + place, s.to(state.dtype.element_ty), mask=inside & (goal >= 0))
