"""The gated delta rule token by token, fp32 inside: gates, l2 norms, update and output in one kernel that reads and writes
each state once. For sequences with one token, and for fp32 inputs of any length, where exactness counts more than speed.
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.base import Snapshots
from twinflow.kernels.triton_tools import power_of_2, sigmoid, softplus


def run_tokens(
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
    only_single: bool,
    snapshots: Snapshots | None = None,
    value_tile: int = 32,
    warps: int = 4,
) -> None:
    """Updates states and outputs of all sequences, or with `only_single` of those that have exactly one token."""
    heads, v_dim, k_dim = state.shape[1:]
    tile = min(value_tile, power_of_2(v_dim))
    _run_tokens[(triton.cdiv(v_dim, tile), heads, fresh.shape[0])](
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
        snapshots.starts if snapshots is not None else cu_seqlens,
        snapshots.after if snapshots is not None else cu_seqlens,
        snapshots.rows if snapshots is not None else state_rows,
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
        ONLY_SINGLE=only_single,
        SNAPSHOTS=snapshots is not None and not only_single,
        num_warps=warps,
    )


@triton.jit
def _run_tokens(
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
    snapshot_starts,
    snapshot_after,
    snapshot_rows,
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
    ONLY_SINGLE: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
):
    """TILE value dims of one head of one sequence."""
    head = tl.program_id(1)
    seq = tl.program_id(2)
    start = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    if (start == end) | (ONLY_SINGLE & (end - start > 1)):
        return
    row = tl.load(state_rows + seq)
    kc = tl.arange(0, WIDTH)
    vc = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_k, in_v = kc < K, vc < V
    place = (head * V + vc)[:, None] * K + kc[None, :]
    inside = in_v[:, None] & in_k[None, :]
    known = inside & (row >= 0) & (tl.load(fresh + seq) == 0)
    s = tl.load(state + row * state_stride + place, mask=known, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    group = head // GROUP
    token = start.to(tl.int64)
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
        for _ in range(begin, until):
            key = tl.load(k + token * k_stride + group * K + kc, mask=in_k, other=0.0).to(tl.float32)
            query = tl.load(q + token * q_stride + group * K + kc, mask=in_k, other=0.0).to(tl.float32)
            value = tl.load(v + token * v_stride + head * V + vc, mask=in_v, other=0.0).to(tl.float32)
            decay = tl.exp(rate * softplus(tl.load(a + token * a_stride + head).to(tl.float32) + bias))
            beta = sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
            key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
            query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * SCALE
            s *= decay
            delta = (value - tl.sum(s * key[None, :], 1)) * beta
            s += delta[:, None] * key[None, :]
            y = tl.sum(s * query[None, :], 1)
            tl.store(out + token * HEADS * V + head * V + vc, y.to(out.dtype.element_ty), mask=in_v)
            token += 1
        tl.store(state + goal * state_stride + place, s.to(state.dtype.element_ty), mask=inside & (goal >= 0))
