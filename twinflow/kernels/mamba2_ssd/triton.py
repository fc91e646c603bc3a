"""Mamba-2's selective state space on a GPU. Semantics: `reference.py`.

Sequences with one token take `_one_token`, which reads and writes each state once. Longer ones are prepared chunk by chunk
in parallel and then scanned (`chunk_scan`): with a_i the running sum of the log decays d_t A in the chunk,

    Y = exp(a) C S^T + (exp(a_i - a_j) d_j c_i.b_j for j <= i) X + D X;   S <- exp(a_last) S + X^T diag(d exp(a_last - a)) B

(Dao & Gu 2024).
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.chunk_scan.triton import CHUNK_TOKENS, Chunks, scan_chunks
from twinflow.kernels.triton_tools import dot_precision, find_sequence, power_of_2, softplus


def mamba2_ssd(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: tuple[int, ...],
) -> torch.Tensor:
    for each in (x, b, c):
        if each.stride(2) != 1 or each.stride(1) != each.shape[2]:
            raise ValueError(f"heads must lie side by side, strides are {each.stride()}")
    if state.stride()[1:] != (x.shape[2] * b.shape[2], b.shape[2], 1):
        raise ValueError(f"a row of the state must be contiguous, strides are {state.stride()}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    longest, shortest = max(seq_lens, default=0), min(seq_lens, default=0)
    if 1 in seq_lens:
        heads = (dt, a_log, dt_bias, skip)
        all_one = longest == shortest == 1
        one_token(x, b, c, *heads, out, state, state_rows, fresh, cu_seqlens, all_one=all_one)
    if longest > 1:
        chunks = _prepare_chunks(x, b, c, dt, a_log, dt_bias, cu_seqlens, len(seq_lens))
        scan_chunks(c, b, chunks, skip, out, state, state_rows, fresh, cu_seqlens)
    return out


def one_token(
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
    all_one: bool,
    value_tile: int = 32,
    warps: int = 4,
) -> None:
    """Updates the states and outputs of the sequences that have exactly one token; `all_one`: all of them have."""
    heads, p_dim, n_dim = state.shape[1:]
    tile = min(value_tile, power_of_2(p_dim))
    _one_token[(triton.cdiv(p_dim, tile), heads, fresh.shape[0])](
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
        ALL_ONE=all_one,
        num_warps=warps,
    )


def _prepare_chunks(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    sequences: int,
) -> Chunks:
    tokens, heads, _ = x.shape
    n_dim = b.shape[2]
    chunks = Chunks.scratch(x, n_dim, corrected=False)
    _prepare[(heads, tokens // CHUNK_TOKENS + sequences)](
        b,
        c,
        dt,
        a_log,
        dt_bias,
        cu_seqlens,
        chunks.products,
        chunks.queries,
        chunks.keys,
        chunks.decays,
        b.stride(0),
        c.stride(0),
        dt.stride(0),
        sequences,
        HEADS=heads,
        GROUP=heads // b.shape[1],
        N=n_dim,
        WIDTH=power_of_2(n_dim),
        SIZE=CHUNK_TOKENS,
        PRECISION=dot_precision(x.dtype),
        num_warps=4,
        num_stages=1,
    )
    return chunks


@triton.jit
def _one_token(
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
    ALL_ONE: tl.constexpr,
):
    """TILE dims of one head of one sequence."""
    head = tl.program_id(1)
    seq = tl.program_id(2)
    token = seq
    if not ALL_ONE:
        token = tl.load(cu_seqlens + seq)
        if tl.load(cu_seqlens + seq + 1) - token != 1:
            return
    token = token.to(tl.int64)
    row = tl.load(state_rows + seq)
    nc = tl.arange(0, WIDTH)
    pc = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_n, in_p = nc < N, pc < P
    place = row * state_stride + (head * P + pc)[:, None] * N + nc[None, :]
    inside = in_p[:, None] & in_n[None, :]
    known = inside & (row >= 0) & (tl.load(fresh + seq) == 0)
    s = tl.load(state + place, mask=known, other=0.0).to(tl.float32)
    write = tl.load(b + token * b_stride + (head // GROUP) * N + nc, mask=in_n, other=0.0).to(tl.float32)
    read = tl.load(c + token * c_stride + (head // GROUP) * N + nc, mask=in_n, other=0.0).to(tl.float32)
    value = tl.load(x + token * x_stride + head * P + pc, mask=in_p, other=0.0).to(tl.float32)
    step = tl.load(dt + token * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    step = softplus(step)
    s *= tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * step)
    s += (value * step)[:, None] * write[None, :]
    y = tl.sum(s * read[None, :], 1) + tl.load(skip + head).to(tl.float32) * value
    tl.store(state + place, s.to(state.dtype.element_ty), mask=inside & (row >= 0))
    tl.store(out + (token * HEADS + head) * P + pc, y.to(out.dtype.element_ty), mask=in_p)


@triton.jit(do_not_specialize=["sequences"])
def _prepare(
    b,
    c,
    dt,
    a_log,
    dt_bias,
    cu_seqlens,
    products,
    queries,
    keys,
    decays,
    b_stride,
    c_stride,
    dt_stride,
    sequences,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One chunk of one head: its steps, decays and masked products."""
    head = tl.program_id(0)
    block = tl.program_id(1)
    seq = find_sequence(cu_seqlens, sequences, block, SIZE)
    start = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first = start + (block - start // SIZE - seq) * SIZE
    if (first >= end) | (end - start == 1):
        return
    token = tl.arange(0, SIZE)
    live = first + token < end
    t = (first + token).to(tl.int64)
    at = t * HEADS + head
    step = tl.load(dt + t * dt_stride + head, mask=live, other=0.0).to(tl.float32)
    step = tl.where(live, softplus(step + tl.load(dt_bias + head).to(tl.float32)), 0.0)
    g = (-tl.exp(tl.load(a_log + head).to(tl.float32)) * step).to(tl.float64)
    # Sums in fp64 and kept as two floats: small gaps are differences of large sums after a token that forgets nearly all.
    a = tl.cumsum(g, 0)
    high = a.to(tl.float32)
    low = (a - high.to(tl.float64)).to(tl.float32)
    rest = tl.exp((tl.sum(g, 0) - a).to(tl.float32))
    grown = tl.exp(high)
    upto = token[:, None] >= token[None, :]
    gaps = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    decay = tl.exp(tl.where(upto, gaps, 0.0))
    nc = tl.arange(0, WIDTH)
    inside = live[:, None] & (nc < N)[None, :]
    b_t = tl.load(b + t[:, None] * b_stride + (head // GROUP) * N + nc[None, :], mask=inside, other=0.0)
    c_t = tl.load(c + t[:, None] * c_stride + (head // GROUP) * N + nc[None, :], mask=inside, other=0.0)
    m = tl.dot(c_t, tl.trans(b_t), input_precision=PRECISION) * decay * step[None, :]
    m = tl.where(upto, m, 0.0).to(products.dtype.element_ty)
    tl.store(products + (at * SIZE)[:, None] + token[None, :], m, mask=live[:, None])
    tl.store(queries + at, grown, mask=live)
    tl.store(keys + at, step * rest, mask=live)
    tl.store(decays + at, grown, mask=live)
