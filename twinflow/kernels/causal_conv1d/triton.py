"""Causal depthwise convolution on a GPU, states updated in place by row index. Semantics: `reference.py`.

One token per sequence takes one kernel. Otherwise a first kernel reads the states and convolves blocks of tokens in
parallel, and a second one, after it in stream order, replaces the states: no block may see a state already replaced.
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.triton_tools import find_sequence, power_of_2, sigmoid

BLOCK_TOKENS = 32
BLOCK_CHANNELS = 128


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: tuple[int, ...],
    activation: bool = True,
) -> torch.Tensor:
    tokens, channels = x.shape
    sequences, width = len(seq_lens), weight.shape[1]
    if x.stride(1) != 1 or state.stride(2) != 1 or state.stride(1) != width - 1:
        raise ValueError(f"channels of x and rows of the state must be contiguous: {x.stride()}, {state.stride()}")
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    one_each = tokens == sequences and max(seq_lens) == 1
    block = min(BLOCK_CHANNELS, power_of_2(channels))
    columns = triton.cdiv(channels, block)
    tensors = (x, weight, bias if bias is not None else x, state, state_rows, fresh, cu_seqlens, out)
    if one_each:
        _one_token[(columns, sequences)](
            *tensors,
            x.stride(0),
            state.stride(0),
            CHANNELS=channels,
            WIDTH=width,
            BLOCK=block,
            BIAS=bias is not None,
            SILU=activation,
            num_warps=4,
        )
        return out
    size = min(BLOCK_TOKENS, power_of_2(max(seq_lens)))
    _convolve[(columns, tokens // size + sequences)](
        *tensors,
        x.stride(0),
        state.stride(0),
        sequences,
        CHANNELS=channels,
        WIDTH=width,
        SIZE=size,
        BLOCK=block,
        BIAS=bias is not None,
        SILU=activation,
        num_warps=4,
    )
    _replace_states[(columns, sequences)](
        x,
        state,
        state_rows,
        fresh,
        cu_seqlens,
        x.stride(0),
        state.stride(0),
        CHANNELS=channels,
        REACH=width - 1,
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def _one_token(
    x,
    weight,
    bias,
    state,
    state_rows,
    fresh,
    cu_seqlens,
    out,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """A program owns its channels of one sequence: it reads their state, then shifts it."""
    seq = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = c < CHANNELS
    row = tl.load(state_rows + seq)
    known = live & (row >= 0) & (tl.load(fresh + seq) == 0)
    slots = state + row * state_stride + c * (WIDTH - 1)
    token = tl.load(x + seq * x_stride + c, mask=live, other=0.0)
    y = token.to(tl.float32) * tl.load(weight + c * WIDTH + WIDTH - 1, mask=live, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
    for j in tl.static_range(WIDTH - 1):
        before = tl.load(slots + j, mask=known, other=0.0)
        y += before.to(tl.float32) * tl.load(weight + c * WIDTH + j, mask=live, other=0.0).to(tl.float32)
        if j > 0:
            # Slot j-1 was read in the round before; the barrier keeps a write of one warp behind the reads of others.
            tl.debug_barrier()
            tl.store(slots + j - 1, before, mask=live & (row >= 0))
    tl.debug_barrier()
    tl.store(slots + WIDTH - 2, token.to(state.dtype.element_ty), mask=live & (row >= 0))
    if SILU:
        y = y * sigmoid(y)
    tl.store(out + seq * CHANNELS + c, y.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["sequences"])
def _convolve(
    x,
    weight,
    bias,
    state,
    state_rows,
    fresh,
    cu_seqlens,
    out,
    x_stride,
    state_stride,
    sequences,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """SIZE tokens of one sequence by BLOCK channels; the first block of a sequence also reads its state."""
    block = tl.program_id(1)
    seq = find_sequence(cu_seqlens, sequences, block, SIZE)
    start = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first = start + (block - start // SIZE - seq) * SIZE
    if first >= end:
        return
    t = first + tl.arange(0, SIZE)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = c < CHANNELS
    live = (t < end)[:, None] & channel[None, :]
    y = tl.zeros([SIZE, BLOCK], tl.float32)
    if BIAS:
        y += tl.load(bias + c, mask=channel, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(WIDTH):
        source = t - (WIDTH - 1) + j
        at = source.to(tl.int64)[:, None] * x_stride + c[None, :]
        value = tl.load(x + at, mask=live & (source >= start)[:, None], other=0.0).to(tl.float32)
        y += value * tl.load(weight + c * WIDTH + j, mask=channel, other=0.0).to(tl.float32)[None, :]
    if first == start:
        row = tl.load(state_rows + seq)
        if (row >= 0) & (tl.load(fresh + seq) == 0):
            for j in tl.static_range(WIDTH - 1):
                slot = t - start + j  # of the token WIDTH - 1 - j before t, where that lies before the sequence
                at = row * state_stride + c[None, :] * (WIDTH - 1) + slot[:, None]
                value = tl.load(state + at, mask=live & (slot < WIDTH - 1)[:, None], other=0.0).to(tl.float32)
                y += value * tl.load(weight + c * WIDTH + j, mask=channel, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = y * sigmoid(y)
    at = t.to(tl.int64)[:, None] * CHANNELS + c[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _replace_states(
    x,
    state,
    state_rows,
    fresh,
    cu_seqlens,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    REACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last REACH inputs of a sequence: from x, and from its old state where x is shorter than that."""
    seq = tl.program_id(1)
    row = tl.load(state_rows + seq)
    if row < 0:
        return
    start = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    if start == end:
        return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = c < CHANNELS
    known = live & (tl.load(fresh + seq) == 0)
    slots = state + row * state_stride + c * REACH
    for j in tl.static_range(REACH):
        source = end - REACH + j
        # Slot j takes what slot j + n held before (n new tokens); ascending j reads it before it is replaced.
        old = tl.load(slots + j + (end - start), mask=known & (source < start), other=0.0)
        new = tl.load(x + source.to(tl.int64) * x_stride + c, mask=live & (source >= start), other=0.0)
        value = tl.where(source < start, old, new.to(state.dtype.element_ty))
        tl.debug_barrier()
        tl.store(slots + j, value, mask=live)
