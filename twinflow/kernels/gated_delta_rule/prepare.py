"""The parallel half of the chunked gated delta rule, in Triton: each chunk's updates solved at once (WY / UT form).

With c_i the running sum of the log decays in the chunk, D_ij = exp(c_i - c_j) for j <= i and the normed keys k:

    L = I + tril(beta_i D_ij k_i.k_j, -1);   U = L^-1 diag(beta) V;   W = L^-1 diag(beta exp(c)) K;   M = tril(D * Q K^T)

(Yang, Kautz, Hatamizadeh 2024). L^-1 is found by substitution inside blocks of 16 rows, which is stable whatever the
keys, and by matrix products between blocks.
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.chunk_scan.triton import CHUNK_TOKENS, Chunks
from twinflow.kernels.triton_tools import dot_precision, find_sequence, power_of_2, sigmoid, softplus


def prepare_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    sequences: int,
    l2norm_eps: float,
    warps: int = 4,
) -> Chunks:
    """q, k (T, Hk, K), v (T, Hv, V), a, b (T, Hv), any token strides. Norms of q and k go into the factors of `Chunks`, so
    that the scan reads q and k as they are."""
    tokens, heads, v_dim = v.shape
    k_dim = k.shape[2]
    chunks = Chunks.scratch(torch.empty(v.shape, dtype=v.dtype, device=v.device), k_dim, corrected=True)
    _prepare[(heads, tokens // CHUNK_TOKENS + sequences)](
        q,
        k,
        v,
        a,
        b,
        a_log,
        dt_bias,
        cu_seqlens,
        chunks.inputs,
        chunks.corrections,
        chunks.products,
        chunks.queries,
        chunks.keys,
        chunks.decays,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        a.stride(0),
        b.stride(0),
        sequences,
        l2norm_eps,
        HEADS=heads,
        GROUP=heads // k.shape[1],
        K=k_dim,
        V=v_dim,
        K_WIDTH=power_of_2(k_dim),
        V_WIDTH=power_of_2(v_dim),
        SIZE=CHUNK_TOKENS,
        SCALE=k_dim**-0.5,
        PRECISION=dot_precision(v.dtype),
        num_warps=warps,
        num_stages=1,
    )
    return chunks


@triton.jit(do_not_specialize=["sequences"])
def _prepare(
    q,
    k,
    v,
    a,
    b,
    a_log,
    dt_bias,
    cu_seqlens,
    inputs,
    corrections,
    products,
    queries,
    keys,
    decays,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    sequences,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One chunk of one head."""
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

    step = tl.load(a + t * a_stride + head, mask=live, other=0.0).to(tl.float32) + tl.load(dt_bias + head).to(
        tl.float32
    )
    g = -tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus(step)
    g = tl.where(live, g, 0.0).to(tl.float64)
    beta = sigmoid(tl.load(b + t * b_stride + head, mask=live, other=0.0).to(tl.float32))
    beta = tl.where(live, beta, 0.0)
    # Sums in fp64: after a token that forgets nearly all, small gaps are differences of large sums. Kept as two floats,
    # since the differences of all pairs would be slow in fp64 on small GPUs.
    c = tl.cumsum(g, 0)
    high = c.to(tl.float32)
    low = (c - high.to(tl.float64)).to(tl.float32)
    rest = tl.exp((tl.sum(g, 0) - c).to(tl.float32))
    grown = tl.exp(high)
    below = token[:, None] > token[None, :]
    gaps = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    d = tl.exp(tl.where(below, gaps, 0.0))

    kc = tl.arange(0, K_WIDTH)
    vc = tl.arange(0, V_WIDTH)
    rows_k = live[:, None] & (kc < K)[None, :]
    rows_v = live[:, None] & (vc < V)[None, :]
    k_t = tl.load(k + t[:, None] * k_stride + (head // GROUP) * K + kc[None, :], mask=rows_k, other=0.0)
    k_norm = _inverse_norm(k_t, eps)
    kk = tl.dot(k_t, tl.trans(k_t), input_precision=PRECISION) * k_norm[None, :]
    solved = _unit_lower_inverse(tl.where(below, kk * (beta * k_norm)[:, None] * d, 0.0), SIZE)
    v_t = tl.load(v + t[:, None] * v_stride + head * V + vc[None, :], mask=rows_v, other=0.0)
    u_t = tl.dot((solved * beta[None, :]).to(v_t.dtype), v_t, input_precision=PRECISION)
    tl.store(inputs + (at * V)[:, None] + vc[None, :], u_t.to(v_t.dtype), mask=rows_v)
    w_t = tl.dot((solved * (beta * grown * k_norm)[None, :]).to(k_t.dtype), k_t, input_precision=PRECISION)
    tl.store(corrections + (at * K)[:, None] + kc[None, :], w_t.to(k_t.dtype), mask=rows_k)

    q_t = tl.load(q + t[:, None] * q_stride + (head // GROUP) * K + kc[None, :], mask=rows_k, other=0.0)
    q_norm = _inverse_norm(q_t, eps) * SCALE
    qk = tl.dot(q_t, tl.trans(k_t), input_precision=PRECISION) * q_norm[:, None] * k_norm[None, :]
    upto = token[:, None] >= token[None, :]
    m = tl.where(upto, qk * d, 0.0).to(k_t.dtype)
    tl.store(products + (at * SIZE)[:, None] + token[None, :], m, mask=live[:, None])
    tl.store(queries + at, q_norm * grown, mask=live)
    tl.store(keys + at, k_norm * rest, mask=live)
    tl.store(decays + at, grown, mask=live)


@triton.jit
def _inverse_norm(x, eps):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + eps)


@triton.jit
def _unit_lower_inverse(lower, SIZE: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangular (SIZE, SIZE) fp32 matrix.

    With the diagonal blocks inverted, Z = diag^-1 (rest) has 4 block rows, so its fourth power is 0 and
    (I + Z)^-1 = (I - Z)(I + Z^2). Products at fp32 precision for half-precision inputs too: errors of the inverse grow
    through the chunk, and with single tf32 products Triton 3.6 was seen to order the write of an operand to shared memory
    after the barrier that should publish it.
    """
    PRECISION: tl.constexpr = "tf32x3"
    BLOCKS: tl.constexpr = SIZE // 16
    row = tl.arange(0, 16)
    number = tl.arange(0, BLOCKS)
    same = (number[:, None] == number[None, :])[:, None, :, None]  # (BLOCKS, 1, BLOCKS, 1)
    tiles = tl.reshape(lower, [BLOCKS, 16, BLOCKS, 16])
    diagonal = tl.sum(tl.where(same, tiles, 0.0), 2)  # (BLOCKS, 16, 16)
    inverse = tl.where((row[:, None] == row[None, :])[None, :, :], 1.0, 0.0) + tl.zeros_like(diagonal)
    for i in range(1, 16):
        here = (row == i)[None, :, None]
        factors = tl.sum(tl.where(here, diagonal, 0.0), 1)  # row i of each block: (BLOCKS, 16)
        inverse = tl.where(here, inverse - tl.sum(factors[:, :, None] * inverse, 1)[:, None, :], inverse)
    inverse = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [SIZE, SIZE])
    rest = tl.reshape(tl.where(same, 0.0, tiles), [SIZE, SIZE])
    z = tl.dot(inverse, rest, input_precision=PRECISION)
    square = tl.dot(z, z, input_precision=PRECISION)
    eye = tl.where(tl.arange(0, SIZE)[:, None] == tl.arange(0, SIZE)[None, :], 1.0, 0.0)
    minus = eye - z
    series = minus + tl.dot(minus, square, input_precision=PRECISION)
    return tl.dot(series, inverse, input_precision=PRECISION)
