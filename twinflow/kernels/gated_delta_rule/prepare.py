"""The parallel half of the chunked gated delta rule, in Triton: each chunk's updates solved at once (WY / UT form).

With c_i the running sum of the log decays in the chunk, D_ij = exp(c_i - c_j) for j <= i and the normed keys k:

    N = tril(beta_i D_ij k_i.k_j, -1);   T = (I + N)^-1 diag(beta);   M = tril(D * Q K^T)

(Yang, Kautz, Hatamizadeh 2024). The inverse comes from blocks of 1, 2, 4 .. rows: with X the inverse of the blocks on the
diagonal, R = -X N holds all that is needed, since joining neighbours gives R + P R where P is what R has between the two of
a pair, and X = I + R once one block is left. Nothing in it exceeds 1, whatever the keys, so half precision will do where the
result is kept in it.
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.chunk_scan.triton import CHUNK_TOKENS, Chunks
from twinflow.kernels.triton_tools import dot_precision, find_sequence, multiprocessors, power_of_2, sigmoid, softplus

GATE_HEADS = 8  # heads of a program that computes gates
LOG2_E = tl.constexpr(1.4426950408889634)


def prepare_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    sequences: int,
    l2norm_eps: float,
    members: int | None = None,
    warps: int = 4,
    registers: int | None = 168,
) -> Chunks:
    """q, k (T, Hk, K), a, b (T, Hv), any token strides. The norms of q and k go into the factors, so that the scan reads
    both as they are. members (value heads of a program, dividing Hv / Hk), warps, registers: tuning."""
    tokens, key_heads, k_dim = q.shape
    heads = a.shape[1]
    chunks = Chunks.scratch(tokens, sequences, heads, q, solved=True)
    blocks = chunks.decays.shape[0]
    gates = torch.empty(blocks, heads, 3, CHUNK_TOKENS, dtype=torch.float32, device=q.device)
    width = min(GATE_HEADS, power_of_2(heads, 1))
    _gates[(blocks, triton.cdiv(heads, width))](
        a,
        b,
        a_log,
        dt_bias,
        cu_seqlens,
        gates,
        chunks.decays,
        a.stride(0),
        b.stride(0),
        sequences,
        HEADS=heads,
        WIDTH=width,
        SIZE=CHUNK_TOKENS,
        num_warps=4,
    )
    group = heads // key_heads
    if members is None:
        # Together, heads of a key head share two of their products; but a program of one has fewer registers to spill, so it
        # takes very many chunks for that to be faster.
        members = group if key_heads * blocks >= 32 * multiprocessors(q.device) else 1
    _prepare[(heads // members, blocks)](
        q,
        k,
        gates,
        cu_seqlens,
        chunks.products,
        chunks.solved,
        chunks.factors,
        q.stride(0),
        k.stride(0),
        sequences,
        l2norm_eps,
        HEADS=heads,
        GROUP=group,
        MEMBERS=members,
        K=k_dim,
        K_WIDTH=power_of_2(k_dim),
        SIZE=CHUNK_TOKENS,
        LEVELS=CHUNK_TOKENS.bit_length() - 1,
        SCALE=k_dim**-0.5,
        OPERAND=tl.float32 if q.dtype == torch.float32 else tl.float16,
        PRECISION=dot_precision(q.dtype),
        num_warps=warps,
        num_stages=1,
        maxnreg=registers,
    )
    return chunks


@triton.jit(do_not_specialize=["sequences"])
def _gates(
    a,
    b,
    a_log,
    dt_bias,
    cu_seqlens,
    gates,
    decays,
    a_stride,
    b_stride,
    sequences,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """WIDTH heads of one chunk: c in powers of 2, beta, and the decay after each token, into gates (blocks, HEADS, 3, SIZE)."""
    block = tl.program_id(0)
    seq = find_sequence(cu_seqlens, sequences, block, SIZE)
    start = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first = start + (block - start // SIZE - seq) * SIZE
    if (first >= end) | (end - start == 1):
        return
    token = tl.arange(0, SIZE)
    head = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = head < HEADS
    live = (first + token < end)[:, None] & real[None, :]
    t = (first + token).to(tl.int64)[:, None]
    step = tl.load(a + t * a_stride + head[None, :], mask=live, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + head, mask=real, other=0.0).to(tl.float32)[None, :]
    rate = -tl.exp(tl.load(a_log + head, mask=real, other=0.0).to(tl.float32))
    # What exp(-40) leaves of a state is below the resolution of fp32; with that floor the sums fit one float.
    g = tl.where(live, tl.maximum(rate[None, :] * softplus(step), -40.0), 0.0)
    beta = sigmoid(tl.load(b + t * b_stride + head[None, :], mask=live, other=0.0).to(tl.float32))
    c = tl.cumsum(g.to(tl.float64) * LOG2_E, 0)
    total = tl.sum(g.to(tl.float64) * LOG2_E, 0)
    place = gates + ((block * HEADS + head) * 3 * SIZE)[None, :] + token[:, None]
    tl.store(place, c.to(tl.float32), mask=real[None, :])
    tl.store(place + SIZE, tl.where(live, beta, 0.0), mask=real[None, :])
    tl.store(place + 2 * SIZE, tl.exp2((total[None, :] - c).to(tl.float32)), mask=real[None, :])
    tl.store(decays + block * HEADS + head, tl.exp2(total.to(tl.float32)), mask=real)


@triton.jit(do_not_specialize=["sequences"])
def _prepare(
    q,
    k,
    gates,
    cu_seqlens,
    products,
    solved,
    factors,
    q_stride,
    k_stride,
    sequences,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    K: tl.constexpr,
    K_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    SCALE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One chunk of MEMBERS value heads that read one key head: they share K K^T and Q K^T."""
    head = tl.program_id(0) * MEMBERS
    block = tl.program_id(1)
    seq = find_sequence(cu_seqlens, sequences, block, SIZE)
    start = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first = start + (block - start // SIZE - seq) * SIZE
    if (first >= end) | (end - start == 1):
        return
    token = tl.arange(0, SIZE)
    kc = tl.arange(0, K_WIDTH)
    inside = (first + token < end)[:, None]
    if K != K_WIDTH:
        inside = inside & (kc < K)[None, :]
    from_k, from_q = k + first.to(tl.int64) * k_stride, q + first.to(tl.int64) * q_stride
    column = (head // GROUP) * K + kc[None, :]
    k_t = tl.load(from_k + (token[:, None] * k_stride + column), mask=inside, other=0.0)
    q_t = tl.load(from_q + (token[:, None] * q_stride + column), mask=inside, other=0.0)
    k_norm = _inverse_norm(k_t, eps)
    q_norm = _inverse_norm(q_t, eps) * SCALE
    kk = tl.dot(k_t, tl.trans(k_t), input_precision=PRECISION) * k_norm[None, :] * -k_norm[:, None]
    qk = tl.dot(q_t, tl.trans(k_t), input_precision=PRECISION) * k_norm[None, :] * q_norm[:, None]
    below = token[:, None] > token[None, :]
    upto = token[:, None] >= token[None, :]
    apart = token[:, None] ^ token[None, :]
    square = token[:, None] * SIZE + token[None, :]
    for member in range(MEMBERS):
        at = (block * HEADS + head + member).to(tl.int64)
        # Read here in the layouts that the matrices have; what a sum of this kernel left would have to be moved there.
        gate = gates + at * 3 * SIZE
        gate_row, gate_column = gate + token[:, None], gate + token[None, :]
        d = tl.where(upto, tl.exp2(tl.load(gate_row) - tl.load(gate_column)), 0.0)
        tl.store(products + at * SIZE * SIZE + square, (qk * d).to(products.dtype.element_ty))
        r = tl.where(below, kk * (d * tl.load(gate_row + SIZE)), 0.0)
        # Blocks of 16 first: each is a warp's own, and so are its products.
        own = tl.arange(0, 4)[:, None, None, None] == tl.arange(0, 4)[None, None, :, None]
        d = tl.sum(tl.where(own, tl.reshape(r, (4, 16, 4, 16)), 0.0), 2)
        near = (tl.arange(0, 16)[:, None] ^ tl.arange(0, 16)[None, :])[None, :, :]
        for level in tl.static_range(4):
            between = tl.where((near >> level) == 1, d, 0.0)
            d = tl.dot(between.to(OPERAND), d.to(OPERAND), d, input_precision=PRECISION)
        r = tl.reshape(r, (4, 16, SIZE))
        r = tl.reshape(tl.dot(d.to(OPERAND), r.to(OPERAND), r, input_precision=PRECISION), (SIZE, SIZE))
        for level in tl.static_range(4, LEVELS):
            between = tl.where((apart >> level) == 1, r, 0.0)
            r = tl.dot(between.to(OPERAND), r.to(OPERAND), r, input_precision=PRECISION)
        beta = tl.load(gate_column + SIZE)
        x = tl.where(apart == 0, beta, r * beta)
        tl.store(solved + at * SIZE * SIZE + square, x.to(solved.dtype.element_ty))
        grown = tl.exp2(tl.load(gate + token))
        factor = factors + at * 3 * SIZE + token
        tl.store(factor, q_norm * grown)
        tl.store(factor + SIZE, k_norm * tl.load(gate + 2 * SIZE + token))
        tl.store(factor + 2 * SIZE, -k_norm * grown)


@triton.jit
def _inverse_norm(x, eps):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + eps)
