"""The selective state space token by token, fp32 inside: step, update and output in one kernel that reads and writes each
state once. For sequences with one token, and for fp32 inputs of any length, where exactness counts more than speed.
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.base import Snapshots
from twinflow.kernels.triton_tools import power_of_2, softplus


def run_tokens(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    out: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    only_single: bool,
    snapshots: Snapshots | None = None,
    value_tile: int = 32,
    warps: int = 4,
) -> None:
    """Updates states and outputs of all sequences, or with `only_single` of those that have exactly one token."""
    heads, p_dim, n_dim = state.shape[1:]
    tile = min(value_tile, power_of_2(p_dim))
    _run_tokens[(triton.cdiv(p_dim, tile), heads, fresh.shape[0])](
        x,
        b,
        c,
        dt,
        a_log,
        dt_bias,
        skip,
        out,
        state,
        state_rows,
        fresh,
        cu_seqlens,
        snapshots.starts if snapshots is not None else cu_seqlens,
        snapshots.after if snapshots is not None else cu_seqlens,
        snapshots.rows if snapshots is not None else state_rows,
        x.stride(0),
        b.stride(0),
        c.stride(0),
        dt.stride(0),
        state.stride(0),
        HEADS=heads,
        GROUP=heads // b.shape[1],
        N=n_dim,
        P=p_dim,
        WIDTH=power_of_2(n_dim),
        TILE=tile,
        ONLY_SINGLE=only_single,
        SNAPSHOTS=snapshots is not None and not only_single,
        num_warps=warps,
    )


@triton.jit
def _run_tokens(
    x,
    b,
    c,
    dt,
    a_log,
    dt_bias,
    skip,
    out,
    state,
    state_rows,
    fresh,
    cu_seqlens,
    snapshot_starts,
    snapshot_after,
    snapshot_rows,
    x_stride,
    b_stride,
    c_stride,
    dt_stride,
    state_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ONLY_SINGLE: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
):
    """TILE dims of one head of one sequence."""
    head = tl.program_id(1)
    seq = tl.program_id(2)
    start = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    if (start == end) | (ONLY_SINGLE & (end - start > 1)):
        return
    row = tl.load(state_rows + seq)
    nc = tl.arange(0, WIDTH)
    pc = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_n, in_p = nc < N, pc < P
    place = (head * P + pc)[:, None] * N + nc[None, :]
    inside = in_p[:, None] & in_n[None, :]
    known = inside & (row >= 0) & (tl.load(fresh + seq) == 0)
    s = tl.load(state + row * state_stride + place, mask=known, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    through = tl.load(skip + head).to(tl.float32)
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
            write = tl.load(b + token * b_stride + group * N + nc, mask=in_n, other=0.0).to(tl.float32)
            read = tl.load(c + token * c_stride + group * N + nc, mask=in_n, other=0.0).to(tl.float32)
            value = tl.load(x + token * x_stride + head * P + pc, mask=in_p, other=0.0).to(tl.float32)
            step = softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + bias)
            s *= tl.exp(rate * step)
            s += (value * step)[:, None] * write[None, :]
            y = tl.sum(s * read[None, :], 1) + through * value
            tl.store(out + (token * HEADS + head) * P + pc, y.to(out.dtype.element_ty), mask=in_p)
            token += 1
        tl.store(state + goal * state_stride + place, s.to(state.dtype.element_ty), mask=inside & (goal >= 0))
