"""Carries a matrix state from chunk to chunk: what remains of a linear recurrence once its chunks are prepared.

Per head, with the chunk's rows Q, K, U, its corrections W (delta rule only) and its masked products M, all made in
parallel by a preparing kernel, and the state S (V, K):

    X = U - W S^T;   O = diag(queries) Q S^T + M X + skip U;   S <- decay S + X^T diag(keys) K

A program owns some value dims of one head of one sequence and walks through its chunks, so S never leaves registers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twinflow.kernels.triton_tools import dot_precision, multiprocessors, power_of_2, shared_bytes

CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Chunks:
    """What the preparing kernel leaves for each token and head. Rows of tokens that are alone in their sequence are not
    written, nor read."""

    inputs: torch.Tensor  # U (T, H, V), any token stride, heads side by side
    corrections: torch.Tensor | None  # W (T, H, K)
    products: torch.Tensor  # M (T, H, CHUNK_TOKENS): scores against the tokens of its chunk, 0 from the token on
    queries: torch.Tensor  # (T, H) fp32: factor of the token's query against the state before the chunk
    keys: torch.Tensor  # (T, H) fp32: factor of the token's key in the state after the chunk
    decays: torch.Tensor  # (T, H) fp32: decay from the chunk's start up to and including the token

    @classmethod
    def scratch(cls, inputs: torch.Tensor, key_dim: int, corrected: bool) -> "Chunks":
        """Uninitialised tensors beside `inputs` (T, H, V)."""
        tokens, heads = inputs.shape[:2]
        scalars = torch.empty(3, tokens, heads, dtype=torch.float32, device=inputs.device)
        return cls(
            inputs=inputs,
            corrections=inputs.new_empty(tokens, heads, key_dim) if corrected else None,
            products=inputs.new_empty(tokens, heads, CHUNK_TOKENS),
            queries=scalars[0],
            keys=scalars[1],
            decays=scalars[2],
        )


def scan_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    chunks: Chunks,
    skip: torch.Tensor | None,
    out: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    cu_seqlens: torch.Tensor,
    value_tile: int | None = None,
    warps: int = 4,
    stages: int | None = None,
) -> None:
    """Runs all sequences of more than one token; others are left alone.

    q, k (T, G, K), head h reads h // (H / G), any token stride; skip (H,) or None; out (T, H, V) contiguous, written;
    state (R, H, V, K), read and updated by row, -1 = start from zeros and store nothing; fresh (B,) bool. value_tile,
    warps, stages: tuning; chosen by the number of heads in flight and the GPU's shared memory when None.
    """
    sequences = fresh.shape[0]
    _, heads, v_dim, k_dim = state.shape
    u, w = chunks.inputs, chunks.corrections
    v_width = power_of_2(v_dim)
    if value_tile is None:
        # Narrow tiles read Q, K, W and M more often but give a lone prompt enough programs to fill the GPU.
        enough = 2 * sequences * heads >= multiprocessors(q.device)
        value_tile = 64 if enough and q.dtype != torch.float32 else 32
    if stages is None:
        # Loading ahead is more than speed on Hopper: without it, and without corrections, Triton 3.6 publishes operands of
        # the matrix unit to shared memory too late.
        fits = k_dim <= 128 or w is None
        stages = 2 if fits and shared_bytes(q.device) >= 160 << 10 else 1
    tile = min(value_tile, v_width)
    _scan[(triton.cdiv(v_dim, tile), heads, sequences)](
        q,
        k,
        u,
        w if w is not None else u,
        chunks.products,
        chunks.queries,
        chunks.keys,
        chunks.decays,
        skip if skip is not None else chunks.queries,
        out,
        state,
        state_rows,
        fresh,
        cu_seqlens,
        q.stride(0),
        k.stride(0),
        u.stride(0),
        state.stride(0),
        HEADS=heads,
        GROUP=heads // q.shape[1],
        K=k_dim,
        V=v_dim,
        K_WIDTH=power_of_2(k_dim),
        TILE=tile,
        SIZE=CHUNK_TOKENS,
        CORRECTED=w is not None,
        SKIP=skip is not None,
        PRECISION=dot_precision(q.dtype),
        num_warps=warps,
        num_stages=stages if q.dtype != torch.float32 else 1,
    )


@triton.jit
def _scan(
    q,
    k,
    u,
    w,
    products,
    queries,
    keys,
    decays,
    skip,
    out,
    state,
    state_rows,
    fresh,
    cu_seqlens,
    q_stride,
    k_stride,
    u_stride,
    state_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    CORRECTED: tl.constexpr,
    SKIP: tl.constexpr,
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
    place = row * state_stride + (head * V + vc[None, :]) * K + kc[:, None]
    inside = (kc < K)[:, None] & (vc < V)[None, :]
    known = inside & (row >= 0) & (tl.load(fresh + seq) == 0)
    s = tl.load(state + place, mask=known, other=0.0).to(tl.float32)  # S^T (K, TILE)
    token = tl.arange(0, SIZE)
    group = head // GROUP
    for first in range(start, end, SIZE):
        t = (first + token).to(tl.int64)
        live = first + token < end
        rows_k = live[:, None] & (kc < K)[None, :]
        rows_v = live[:, None] & (vc < V)[None, :]
        at = t * HEADS + head
        keys_t = tl.load(k + t[:, None] * k_stride + group * K + kc[None, :], mask=rows_k, other=0.0)
        queries_t = tl.load(q + t[:, None] * q_stride + group * K + kc[None, :], mask=rows_k, other=0.0)
        x = tl.load(u + t[:, None] * u_stride + head * V + vc[None, :], mask=rows_v, other=0.0)
        m = tl.load(products + at[:, None] * SIZE + token[None, :], mask=live[:, None], other=0.0)
        before = s.to(keys_t.dtype)
        added = x.to(tl.float32)
        if CORRECTED:
            correction = tl.load(w + at[:, None] * K + kc[None, :], mask=rows_k, other=0.0)
            added -= tl.dot(correction, before, input_precision=PRECISION)
        y = tl.dot(queries_t, before, input_precision=PRECISION)
        y *= tl.load(queries + at, mask=live, other=0.0)[:, None]
        y = tl.dot(m, added.to(m.dtype), y, input_precision=PRECISION)
        if SKIP:
            y += tl.load(skip + head).to(tl.float32) * x.to(tl.float32)
        tl.store(out + (at * V)[:, None] + vc[None, :], y.to(out.dtype.element_ty), mask=rows_v)
        added *= tl.load(keys + at, mask=live, other=0.0)[:, None]
        s *= tl.load(decays + (tl.minimum(first + SIZE, end) - 1).to(tl.int64) * HEADS + head)
        s = tl.dot(tl.trans(keys_t), added.to(keys_t.dtype), s, input_precision=PRECISION)
    tl.store(state + place, s.to(state.dtype.element_ty), mask=inside & (row >= 0))
