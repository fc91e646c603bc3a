"""The parallel half of the chunked selective state space, in Triton: what `chunk_scan` needs of each chunk.

With c_i the running sum of the log decays in the chunk and the steps d: M_ij = exp(c_i - c_j) d_j C_i.B_j for j <= i; a
query is weighed by exp(c_i), a key by d_j exp(c_last - c_j).
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.chunk_scan.triton import CHUNK_TOKENS, Chunks
from twinflow.kernels.triton_tools import dot_precision, find_sequence, power_of_2, softplus

STEP_HEADS = 8  # heads of a program that computes steps
SHARING_HEADS = 4  # heads of one group, at most, whose products one program makes
LOG2_E = tl.constexpr(1.4426950408889634)


def prepare_chunks(
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    sequences: int,
) -> Chunks:
    """b, c (T, G, N), dt (T, H), any token strides."""
    tokens, groups, n_dim = b.shape
    heads = dt.shape[1]
    chunks = Chunks.scratch(tokens, sequences, heads, b, solved=False)
    blocks = chunks.decays.shape[0]
    steps = torch.empty(blocks, heads, 2, CHUNK_TOKENS, dtype=torch.float32, device=b.device)
    width = min(STEP_HEADS, power_of_2(heads, 1))
    _steps[(blocks, triton.cdiv(heads, width))](
        dt,
        a_log,
        dt_bias,
        cu_seqlens,
        steps,
        chunks.factors,
        chunks.decays,
        dt.stride(0),
        sequences,
        HEADS=heads,
        WIDTH=width,
        SIZE=CHUNK_TOKENS,
        num_warps=4,
    )
    group = heads // groups
    members = next(n for n in range(min(group, SHARING_HEADS), 0, -1) if group % n == 0)
    _products[(heads // members, blocks)](
        b,
        c,
        steps,
        cu_seqlens,
        chunks.products,
        b.stride(0),
        c.stride(0),
        sequences,
        HEADS=heads,
        GROUP=group,
        MEMBERS=members,
        N=n_dim,
        WIDTH=power_of_2(n_dim),
        SIZE=CHUNK_TOKENS,
        PRECISION=dot_precision(b.dtype),
        num_warps=4,
        num_stages=1,
    )
    return chunks


@triton.jit(do_not_specialize=["sequences"])
def _steps(
    dt,
    a_log,
    dt_bias,
    cu_seqlens,
    steps,
    factors,
    decays,
    dt_stride,
    sequences,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """WIDTH heads of one chunk: c in powers of 2 and d into steps (blocks, HEADS, 2, SIZE), the factors and the decay."""
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
    step = tl.load(dt + t * dt_stride + head[None, :], mask=live, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + head, mask=real, other=0.0).to(tl.float32)[None, :]
    step = tl.where(live, softplus(step), 0.0)
    rate = -tl.exp(tl.load(a_log + head, mask=real, other=0.0).to(tl.float32))
    # What exp(-40) leaves of a state is below the resolution of fp32; with that floor the sums fit one float.
    g = tl.maximum(rate[None, :] * step, -40.0).to(tl.float64) * LOG2_E
    c = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    at = block * HEADS + head
    place = steps + (at * 2 * SIZE)[None, :] + token[:, None]
    tl.store(place, c.to(tl.float32), mask=real[None, :])
    tl.store(place + SIZE, step, mask=real[None, :])
    factor = factors + (at * 3 * SIZE)[None, :] + token[:, None]
    tl.store(factor, tl.exp2(c.to(tl.float32)), mask=real[None, :])
    tl.store(factor + SIZE, step * tl.exp2((total[None, :] - c).to(tl.float32)), mask=real[None, :])
    tl.store(decays + at, tl.exp2(total.to(tl.float32)), mask=real)


@triton.jit(do_not_specialize=["sequences"])
def _products(
    b,
    c,
    steps,
    cu_seqlens,
    products,
    b_stride,
    c_stride,
    sequences,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One chunk of MEMBERS heads of one group: they share C B^T."""
    block = tl.program_id(1)
    seq = find_sequence(cu_seqlens, sequences, block, SIZE)
    start = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first = start + (block - start // SIZE - seq) * SIZE
    if (first >= end) | (end - start == 1):
        return
    token = tl.arange(0, SIZE)
    nc = tl.arange(0, WIDTH)
    inside = (first + token < end)[:, None]
    if N != WIDTH:
        inside = inside & (nc < N)[None, :]
    head = tl.program_id(0) * MEMBERS
    column = (head // GROUP) * N + nc[None, :]
    from_b, from_c = b + first.to(tl.int64) * b_stride, c + first.to(tl.int64) * c_stride
    b_t = tl.load(from_b + (token[:, None] * b_stride + column), mask=inside, other=0.0)
    c_t = tl.load(from_c + (token[:, None] * c_stride + column), mask=inside, other=0.0)
    cb = tl.dot(c_t, tl.trans(b_t), input_precision=PRECISION)
    upto = token[:, None] >= token[None, :]
    for member in range(MEMBERS):
        at = (block * HEADS + head + member).to(tl.int64)
        step = steps + at * 2 * SIZE
        before, after = step + token[:, None], step + token[None, :]
        decay = tl.exp2(tl.load(before) - tl.load(after))
        m = tl.where(upto, cb * decay * tl.load(after + SIZE), 0.0)
        place = products + at * SIZE * SIZE + token[:, None] * SIZE + token[None, :]
        tl.store(place, m.to(products.dtype.element_ty))
