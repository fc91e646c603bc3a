"""Gated delta rule on a GPU. Semantics: `reference.py`.

Sequences with one token take `_one_token`: gates, l2 norms, update and output in one kernel that reads and writes each
state once. Longer ones are prepared chunk by chunk in parallel (`prepare.py`) and then scanned (`chunk_scan`).
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.chunk_scan.triton import scan_chunks
from twinflow.kernels.gated_delta_rule.prepare import prepare_chunks
from twinflow.kernels.triton_tools import power_of_2, sigmoid, softplus

# Chunks of half-precision inputs are computed from fp32 copies of them: only that form has passed on a card so far
# (docs/performance.md). False takes the inputs as they are, several times faster.
WIDEN_CHUNKS = True


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: tuple[int, ...],
    l2norm_eps: float = 1e-6,
    widen_chunks: bool = WIDEN_CHUNKS,
) -> torch.Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    longest, shortest = max(seq_lens, default=0), min(seq_lens, default=0)
    for x in (q, k, v):
        if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            raise ValueError(f"heads must lie side by side, strides are {x.stride()}")
    if state.stride()[1:] != (v.shape[2] * k.shape[2], k.shape[2], 1):
        raise ValueError(f"a row of the state must be contiguous, strides are {state.stride()}")
    gates = (a, b, a_log, dt_bias)
    where = (state, state_rows, fresh, cu_seqlens)
    if 1 in seq_lens:
        one_token(q, k, v, *gates, out, *where, l2norm_eps, all_one=longest == shortest == 1)
    if longest > 1:
        if widen_chunks:
            q, k, v = q.float(), k.float(), v.float()
        chunks = prepare_chunks(q, k, v, *gates, cu_seqlens, len(seq_lens), l2norm_eps)
        scan_chunks(q, k, chunks, None, out, *where)
    return out


def one_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    cu_seqlens: torch.Tensor,
    l2norm_eps: float,
    *,
    all_one: bool,
    value_tile: int = 32,
    warps: int = 4,
) -> None:
    """Updates the states and outputs of the sequences that have exactly one token; `all_one`: all of them have."""
    heads, v_dim, k_dim = state.shape[1:]
    tile = min(value_tile, power_of_2(v_dim))
    _one_token[(triton.cdiv(v_dim, tile), heads, fresh.shape[0])](
        q,
        k,
        v,
        a,
        b,
        a_log,
        dt_bias,
        out,
        state,
        state_rows,
        fresh,
        cu_seqlens,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        a.stride(0),
        b.stride(0),
        state.stride(0),
        l2norm_eps,
        HEADS=heads,
        GROUP=heads // q.shape[1],
        K=k_dim,
        V=v_dim,
        WIDTH=power_of_2(k_dim),
        TILE=tile,
        SCALE=k_dim**-0.5,
        ALL_ONE=all_one,
        num_warps=warps,
    )


@triton.jit
def _one_token(
    q,
    k,
    v,
    a,
    b,
    a_log,
    dt_bias,
    out,
    state,
    state_rows,
    fresh,
    cu_seqlens,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    state_stride,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    ALL_ONE: tl.constexpr,
):
    """TILE value dims of one head of one sequence."""
    head = tl.program_id(1)
    seq = tl.program_id(2)
    token = seq
    if not ALL_ONE:
        token = tl.load(cu_seqlens + seq)
        if tl.load(cu_seqlens + seq + 1) - token != 1:
            return
    token = token.to(tl.int64)
    row = tl.load(state_rows + seq)
    kc = tl.arange(0, WIDTH)
    vc = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_k, in_v = kc < K, vc < V
    place = row * state_stride + (head * V + vc)[:, None] * K + kc[None, :]
    inside = in_v[:, None] & in_k[None, :]
    known = inside & (row >= 0) & (tl.load(fresh + seq) == 0)
    s = tl.load(state + place, mask=known, other=0.0).to(tl.float32)
    key = tl.load(k + token * k_stride + (head // GROUP) * K + kc, mask=in_k, other=0.0).to(tl.float32)
    query = tl.load(q + token * q_stride + (head // GROUP) * K + kc, mask=in_k, other=0.0).to(tl.float32)
    value = tl.load(v + token * v_stride + head * V + vc, mask=in_v, other=0.0).to(tl.float32)
    step = tl.load(a + token * a_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    g = -tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus(step)
    beta = sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
    key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
    query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * SCALE
    s *= tl.exp(g)
    delta = (value - tl.sum(s * key[None, :], 1)) * beta
    s += delta[:, None] * key[None, :]
    y = tl.sum(s * query[None, :], 1)
    tl.store(state + place, s.to(state.dtype.element_ty), mask=inside & (row >= 0))
    tl.store(out + token * HEADS * V + head * V + vc, y.to(out.dtype.element_ty), mask=in_v)
