"""One token of a whole Gated DeltaNet layer between its two projections, in one launch. Semantics: `reference.py`.

A program owns one key head of one sequence with all value heads that read it, hence every channel of the convolution that
they need: it alone reads and shifts those inputs, so nothing has to be ordered between programs. The states of its value
heads, most of what moves, are read and written once.
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.triton_tools import power_of_2, sigmoid, softplus


def gated_delta_decode(
    mixed: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv: torch.Tensor,
    conv_state: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    norm_eps: float,
    l2norm_eps: float = 1e-6,
    warps: int = 8,
    registers: int | None = 128,
) -> torch.Tensor:
    sequences, heads = a.shape
    v_dim, k_dim = state.shape[2:]
    key_heads = (mixed.shape[1] - heads * v_dim) // (2 * k_dim)
    taps = conv.shape[1]
    if conv_state.stride()[1:] != (taps - 1, 1) or state.stride()[1:] != (v_dim * k_dim, k_dim, 1):
        raise ValueError(f"rows of states must be contiguous, strides are {conv_state.stride()} and {state.stride()}")
    for x in (mixed, z, a, b):
        if x.stride(1) != 1:
            raise ValueError(f"channels and heads must lie side by side, strides are {x.stride()}")
    out = torch.empty(sequences, heads * v_dim, dtype=mixed.dtype, device=mixed.device)
    _decode[(key_heads, sequences)](
        mixed,
        z,
        a,
        b,
        conv,
        conv_state,
        a_log,
        dt_bias,
        state,
        norm,
        state_rows,
        fresh,
        out,
        mixed.stride(0),
        z.stride(0),
        a.stride(0),
        b.stride(0),
        conv_state.stride(0),
        state.stride(0),
        norm_eps,
        l2norm_eps,
        HEADS=heads,
        GROUP=heads // key_heads,
        K=k_dim,
        V=v_dim,
        K_WIDTH=power_of_2(k_dim),
        V_WIDTH=power_of_2(v_dim),
        TAPS=taps,
        SCALE=k_dim**-0.5,
        num_warps=warps,
        maxnreg=registers,
    )
    return out


@triton.jit
def _decode(
    mixed,
    z,
    a,
    b,
    conv,
    conv_state,
    a_log,
    dt_bias,
    state,
    norm,
    state_rows,
    fresh,
    out,
    mixed_stride,
    z_stride,
    a_stride,
    b_stride,
    conv_stride,
    state_stride,
    norm_eps,
    l2norm_eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    SCALE: tl.constexpr,
):
    group = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    row = tl.load(state_rows + seq)
    stored = row >= 0
    known = stored & (tl.load(fresh + seq) == 0)
    token = mixed + seq * mixed_stride
    slots = conv_state + row * conv_stride
    kc = tl.arange(0, K_WIDTH)
    vc = tl.arange(0, V_WIDTH)
    in_k, in_v = kc < K, vc < V
    inside = in_v[:, None] & in_k[None, :]
    first = group * GROUP  # of its value heads
    queries = group * K + kc  # channels
    keys = (HEADS // GROUP) * K + queries
    values = 2 * (HEADS // GROUP) * K + first * V + vc
    query_window = _window(token, slots, queries, in_k, known, TAPS)
    key_window = _window(token, slots, keys, in_k, known, TAPS)
    query = _convolved(query_window, conv, queries, in_k, TAPS)
    key = _convolved(key_window, conv, keys, in_k, TAPS)
    query *= tl.rsqrt(tl.sum(query * query, 0) + l2norm_eps) * SCALE
    key *= tl.rsqrt(tl.sum(key * key, 0) + l2norm_eps)
    overlap = tl.sum(query * key, 0)
    _shift(query_window, slots, queries, in_k, stored, TAPS)
    _shift(key_window, slots, keys, in_k, stored, TAPS)
    scale = tl.load(norm + vc, mask=in_v, other=0.0).to(tl.float32)
    for member in range(GROUP):
        head = first + member
        place = state + row * state_stride + (head * V + vc)[:, None] * K + kc[None, :]
        s = tl.load(place, mask=inside & known, other=0.0).to(tl.float32)
        window = _window(token, slots, values + member * V, in_v, known, TAPS)
        value = _convolved(window, conv, values + member * V, in_v, TAPS)
        _shift(window, slots, values + member * V, in_v, stored, TAPS)
        gate = tl.load(z + seq * z_stride + head * V + vc, mask=in_v, other=0.0).to(tl.float32)
        step = tl.load(a + seq * a_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus(step))
        beta = sigmoid(tl.load(b + seq * b_stride + head).to(tl.float32))
        # Both products are taken of the state as it was, so that neither waits for the update.
        delta = (value - decay * tl.sum(s * key[None, :], 1)) * beta
        y = decay * tl.sum(s * query[None, :], 1) + delta * overlap
        s = decay * s + delta[:, None] * key[None, :]
        tl.store(place, s.to(state.dtype.element_ty), mask=inside & stored)
        y *= tl.rsqrt(tl.sum(y * y, 0) / V + norm_eps) * scale * gate * sigmoid(gate)
        tl.store(out + (seq * HEADS + head) * V + vc, y.to(out.dtype.element_ty), mask=in_v)


@triton.jit
def _window(token, slots, channel, live, known, TAPS: tl.constexpr):
    """The channels' stored inputs and their newest: (channels, taps rounded up to a power of two)."""
    tap = tl.arange(0, triton.next_power_of_2(TAPS))[None, :]
    before = tl.load(
        slots + channel[:, None] * (TAPS - 1) + tap, mask=live[:, None] & known & (tap < TAPS - 1), other=0.0
    )
    newest = tl.load(token + channel[:, None] + tap * 0, mask=live[:, None] & (tap == TAPS - 1), other=0.0)
    return tl.where(tap < TAPS - 1, before.to(newest.dtype), newest)


@triton.jit
def _convolved(window, conv, channel, live, TAPS: tl.constexpr):
    """SiLU of the convolution, fp32 (channels,)."""
    tap = tl.arange(0, triton.next_power_of_2(TAPS))[None, :]
    weight = tl.load(conv + channel[:, None] * TAPS + tap, mask=live[:, None] & (tap < TAPS), other=0.0)
    y = tl.sum(window.to(tl.float32) * weight.to(tl.float32), 1)
    return y * sigmoid(y)


@triton.jit
def _shift(window, slots, channel, live, stored, TAPS: tl.constexpr):
    """Stores the window but for its oldest input. The barrier keeps the write of one thread behind the reads of others."""
    tap = tl.arange(0, triton.next_power_of_2(TAPS))[None, :]
    tl.debug_barrier()
    place = slots + channel[:, None] * (TAPS - 1) + tap - 1
    tl.store(place, window.to(slots.dtype.element_ty), mask=live[:, None] & stored & (tap > 0) & (tap < TAPS))
