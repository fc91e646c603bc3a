"""One token of a whole Gated DeltaNet layer between its two projections, in one launch. Semantics: `reference.py`.

A program owns one value head of one sequence: its state, most of what moves, is read and written once, and its channels of
the convolution are its own. Those of its key head it shares with the other value heads that read it: all convolve them, and
whoever comes last, by a ticket drawn after reading, shifts what is stored of them.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from twinflow.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous
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
    """warps, registers: tuning."""
    sequences, heads = a.shape
    v_dim, k_dim = state.shape[2:]
    key_heads = (mixed.shape[1] - heads * v_dim) // (2 * k_dim)
    taps = conv.shape[1]
    if conv_state.stride()[1:] != (taps - 1, 1) or state.stride()[1:] != (v_dim * k_dim, k_dim, 1):
        raise ValueError(f"rows of states must be contiguous, strides are {conv_state.stride()} and {state.stride()}")
    for x in (mixed, z, a, b):
        if x.stride(1) != 1:
            raise ValueError(f"channels and heads must lie side by side, strides are {x.stride()}")
    early = dependent_launch(mixed.device)
    out = torch.empty(sequences, heads * v_dim, dtype=mixed.dtype, device=mixed.device)
    _decode[(heads, sequences)](
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
        _tickets(mixed.device, power_of_2(sequences * key_heads, 1 << 12)),
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
        EARLY=early,
        SCALE=k_dim**-0.5,
        num_warps=warps,
        maxnreg=registers,
        launch_pdl=early,
    )
    return out


@lru_cache
def _tickets(device: torch.device, count: int) -> torch.Tensor:
    """Zeros, one per sequence and key head; the kernel leaves zeros behind."""
    return torch.zeros(count, dtype=torch.int32, device=device)


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
    tickets,
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
    EARLY: tl.constexpr,
    SCALE: tl.constexpr,
):
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    row = tl.load(state_rows + seq)
    stored = row >= 0
    known = stored & (tl.load(fresh + seq) == 0)
    group = head // GROUP
    token = mixed + seq * mixed_stride
    slots = conv_state + row * conv_stride
    kc = tl.arange(0, K_WIDTH)
    vc = tl.arange(0, V_WIDTH)
    in_k, in_v = kc < K, vc < V
    inside = in_v[:, None] & in_k[None, :]
    queries = group * K + kc  # channels
    keys = (HEADS // GROUP) * K + queries
    values = 2 * (HEADS // GROUP) * K + head * V + vc
    # Everything is asked for before anything is used.
    place = state + row * state_stride + (head * V + vc)[:, None] * K + kc[None, :]
    s = tl.load(place, mask=inside & known, other=0.0)
    query_before = _before(slots, queries, in_k, known, TAPS)
    key_before = _before(slots, keys, in_k, known, TAPS)
    value_before = _before(slots, values, in_v, known, TAPS)
    scale = tl.load(norm + vc, mask=in_v, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    query_newest = tl.load(token + queries, mask=in_k, other=0.0)
    key_newest = tl.load(token + keys, mask=in_k, other=0.0)
    value_newest = tl.load(token + values, mask=in_v, other=0.0)
    value_shifted = _shifted(slots, token, 2 * (HEADS // GROUP) * K + head * V, known, V, TAPS)
    gate = tl.load(z + seq * z_stride + head * V + vc, mask=in_v, other=0.0).to(tl.float32)
    step = tl.load(a + seq * a_stride + head).to(tl.float32) + bias
    beta = sigmoid(tl.load(b + seq * b_stride + head).to(tl.float32))
    query = _convolved(query_before, query_newest, conv, queries, in_k, TAPS)
    key = _convolved(key_before, key_newest, conv, keys, in_k, TAPS)
    value = _convolved(value_before, value_newest, conv, values, in_v, TAPS)
    # While the state is on its way. The barrier keeps the writes of one thread behind the reads of all others.
    tl.debug_barrier()
    _shift(value_shifted, slots, 2 * (HEADS // GROUP) * K + head * V, stored, V, TAPS)
    query_square, key_square = tl.sum(query * query, 0), tl.sum(key * key, 0)
    last = True
    if GROUP > 1:
        # An atomic that orders memory would wait for the state. Reads of other programs must be over before the last one writes,
        # and these are: the ticket is drawn where the sums of what was read lead to, which are never negative.
        ticket = tickets + seq * (HEADS // GROUP) + group + tl.where((query_square < 0.0) | (key_square < 0.0), 1, 0)
        last = tl.atomic_add(ticket, 1, sem="relaxed") == GROUP - 1
        tl.store(ticket, 0, mask=last)
    _shift_tile(query_before, query_newest, slots, queries, in_k, stored & last, TAPS)
    _shift_tile(key_before, key_newest, slots, keys, in_k, stored & last, TAPS)
    query *= tl.rsqrt(query_square + l2norm_eps) * SCALE
    key *= tl.rsqrt(key_square + l2norm_eps)
    decay = tl.exp(rate * softplus(step))
    s = s.to(tl.float32)
    # Both products are taken of the state as it was, so that neither waits for the update.
    delta = (value - decay * tl.sum(s * key[None, :], 1)) * beta
    y = decay * tl.sum(s * query[None, :], 1) + delta * tl.sum(query * key, 0)
    s = decay * s + delta[:, None] * key[None, :]
    tl.store(place, s.to(state.dtype.element_ty), mask=inside & stored)
    y *= tl.rsqrt(tl.sum(y * y, 0) / V + norm_eps) * scale * gate * sigmoid(gate)
    tl.store(out + (seq * HEADS + head) * V + vc, y.to(out.dtype.element_ty), mask=in_v)


@triton.jit
def _before(slots, channel, live, known, TAPS: tl.constexpr):
    """The channels' stored inputs, oldest first: (channels, a power of two of columns), zeros past the last."""
    slot = tl.arange(0, triton.next_power_of_2(TAPS - 1))[None, :]
    mask = live[:, None] & known & (slot < TAPS - 1)
    return tl.load(slots + channel[:, None] * (TAPS - 1) + slot, mask=mask, other=0.0)


@triton.jit
def _convolved(before, newest, conv, channel, live, TAPS: tl.constexpr):
    """SiLU of the convolution, fp32 (channels,)."""
    tap = tl.arange(0, triton.next_power_of_2(TAPS - 1))[None, :]
    taps = tl.load(conv + channel[:, None] * TAPS + tap, mask=live[:, None] & (tap < TAPS - 1), other=0.0)
    last = tl.load(conv + channel * TAPS + TAPS - 1, mask=live, other=0.0)
    y = tl.sum(before.to(tl.float32) * taps.to(tl.float32), 1) + newest.to(tl.float32) * last.to(tl.float32)
    return y * sigmoid(y)


@triton.jit
def _shifted(slots, token, first, known, COUNT: tl.constexpr, TAPS: tl.constexpr):
    """Of COUNT channels from `first` on: their inputs as they are to be stored next, without the oldest and with the newest, side
    by side as they lie. Stores of single inputs, three apart, would each be a part of a sector of memory."""
    at = tl.arange(0, triton.next_power_of_2(COUNT * (TAPS - 1)))
    inside, newest = at < COUNT * (TAPS - 1), at % (TAPS - 1) == TAPS - 2
    old = tl.load(slots + first * (TAPS - 1) + at + 1, mask=inside & (at % (TAPS - 1) != TAPS - 2) & known, other=0.0)
    new = tl.load(token + first + at // (TAPS - 1), mask=inside & newest, other=0.0)
    return tl.where(newest, new.to(slots.dtype.element_ty), old)


@triton.jit
def _shift(shifted, slots, first, stored, COUNT: tl.constexpr, TAPS: tl.constexpr):
    at = tl.arange(0, triton.next_power_of_2(COUNT * (TAPS - 1)))
    tl.store(slots + first * (TAPS - 1) + at, shifted, mask=(at < COUNT * (TAPS - 1)) & stored)


@triton.jit
def _shift_tile(before, newest, slots, channel, live, stored, TAPS: tl.constexpr):
    """The same from what was read for the convolution."""
    slot = tl.arange(0, triton.next_power_of_2(TAPS - 1))[None, :]
    mask = live[:, None] & stored & (slot > 0) & (slot < TAPS - 1)
    tl.store(slots + channel[:, None] * (TAPS - 1) + slot - 1, before, mask=mask)
    tl.store(slots + channel * (TAPS - 1) + TAPS - 2, newest.to(slots.dtype.element_ty), mask=live & stored)
