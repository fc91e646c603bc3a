"""Causal depthwise convolution on a GPU, states updated in place by row index. Semantics: `reference.py`.

A program takes some channels of a block of tokens of one sequence and walks along the tokens, the last inputs in registers.
The program of a sequence's first block alone reads the sequence's state and, once done, replaces it, so no program can see a
state already replaced.
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.base import Snapshots
from twinflow.kernels.triton_tools import find_sequence, power_of_2, sigmoid

BLOCK_TOKENS = 32
BLOCK_CHANNELS = 256
MAX_TAPS = 4


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
    snapshots: Snapshots | None = None,
    block_tokens: int = BLOCK_TOKENS,
    block_channels: int = BLOCK_CHANNELS,
    warps: int = 2,
) -> torch.Tensor:
    tokens, channels = x.shape
    sequences, taps = len(seq_lens), weight.shape[1]
    if not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"a convolution over {taps} tokens is not supported: 2 to {MAX_TAPS} are")
    if x.stride(1) != 1 or state.stride(2) != 1 or state.stride(1) != taps - 1:
        raise ValueError(f"channels of x and rows of the state must be contiguous: {x.stride()}, {state.stride()}")
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    one_each = tokens == sequences and max(seq_lens) == 1
    block = min(block_channels, power_of_2(channels))
    blocks = sequences if one_each else tokens // block_tokens + sequences
    _convolve[(triton.cdiv(channels, block), blocks)](
        x,
        weight,
        bias if bias is not None else x,
        state,
        state_rows,
        fresh,
        cu_seqlens,
        snapshots.starts if snapshots is not None else cu_seqlens,
        snapshots.after if snapshots is not None else cu_seqlens,
        snapshots.rows if snapshots is not None else state_rows,
        out,
        x.stride(0),
        state.stride(0),
        sequences,
        CHANNELS=channels,
        TAPS=taps,
        SIZE=block_tokens,
        BLOCK=block,
        ONE_EACH=one_each,
        BIAS=bias is not None,
        SILU=activation,
        SNAPSHOTS=snapshots is not None,
        num_warps=warps,
    )
    return out


@triton.jit(do_not_specialize=["sequences"])
def _convolve(
    x,
    weight,
    bias,
    state,
    state_rows,
    fresh,
    cu_seqlens,
    snapshot_starts,
    snapshot_after,
    snapshot_rows,
    out,
    x_stride,
    state_stride,
    sequences,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_EACH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
):
    """BLOCK channels of SIZE tokens of one sequence."""
    block = tl.program_id(1)
    if ONE_EACH:
        seq = block
        start, end, first = seq, seq + 1, seq
    else:
        seq = find_sequence(cu_seqlens, sequences, block, SIZE)
        start = tl.load(cu_seqlens + seq)
        end = tl.load(cu_seqlens + seq + 1)
        first = start + (block - start // SIZE - seq) * SIZE
        if first >= end:
            return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = c < CHANNELS
    row = tl.load(state_rows + seq)
    known = live & (row >= 0) & (tl.load(fresh + seq) == 0)
    slots = state + row * state_stride + c * (TAPS - 1)
    at_first = first == start
    place = x + first.to(tl.int64) * x_stride + c
    target = out + first.to(tl.int64) * CHANNELS + c
    count = tl.minimum(end - first, SIZE)
    # Four tokens at a time, the next four on their way meanwhile.
    x0 = tl.load(place, mask=live, other=0.0)
    x1 = tl.load(place + x_stride, mask=live & (count > 1), other=0.0)
    x2 = tl.load(place + 2 * x_stride, mask=live & (count > 2), other=0.0)
    x3 = tl.load(place + 3 * x_stride, mask=live & (count > 3), other=0.0)
    near = _before(place, slots, 1, at_first, live, known, x_stride, TAPS)
    middle = _before(place, slots, 2, at_first, live, known, x_stride, TAPS)
    far = _before(place, slots, 3, at_first, live, known, x_stride, TAPS)
    tap0 = _tap(weight, c, live, 0, TAPS)
    tap1 = _tap(weight, c, live, 1, TAPS)
    tap2 = _tap(weight, c, live, 2, TAPS)
    tap3 = _tap(weight, c, live, 3, TAPS)
    constant = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        constant += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
    for i in range(0, count, 4):
        left = count - i
        y0, y1, y2, y3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
        place += 4 * x_stride
        x0 = tl.load(place, mask=live & (left > 4), other=0.0)
        x1 = tl.load(place + x_stride, mask=live & (left > 5), other=0.0)
        x2 = tl.load(place + 2 * x_stride, mask=live & (left > 6), other=0.0)
        x3 = tl.load(place + 3 * x_stride, mask=live & (left > 7), other=0.0)
        _store(target, constant + far * tap3 + middle * tap2 + near * tap1 + y0 * tap0, live, SILU)
        _store(
            target + CHANNELS, constant + middle * tap3 + near * tap2 + y0 * tap1 + y1 * tap0, live & (left > 1), SILU
        )
        _store(
            target + 2 * CHANNELS, constant + near * tap3 + y0 * tap2 + y1 * tap1 + y2 * tap0, live & (left > 2), SILU
        )
        _store(target + 3 * CHANNELS, constant + y0 * tap3 + y1 * tap2 + y2 * tap1 + y3 * tap0, live & (left > 3), SILU)
        target += 4 * CHANNELS
        far, middle, near = y1, y2, y3
    if at_first:
        if SNAPSHOTS:
            for i in range(tl.load(snapshot_starts + seq), tl.load(snapshot_starts + seq + 1)):
                goal = state + tl.load(snapshot_rows + i) * state_stride + c * (TAPS - 1)
                upto = start + tl.load(snapshot_after + i)
                _store_state(goal, x, slots, c, start, upto, live, known, x_stride, TAPS - 1, IN_PLACE=False)
        if row >= 0:
            _store_state(slots, x, slots, c, start, end, live, known, x_stride, TAPS - 1, IN_PLACE=True)


@triton.jit
def _store(place, y, live, SILU: tl.constexpr):
    if SILU:
        y = y * sigmoid(y)
    tl.store(place, y.to(place.dtype.element_ty), mask=live)


@triton.jit
def _before(place, slots, BACK: tl.constexpr, at_first, live, known, x_stride, TAPS: tl.constexpr):
    """The input BACK tokens before the block, fp32: from the state where the block is the sequence's first."""
    if BACK >= TAPS:
        return tl.zeros(place.shape, tl.float32)
    stored = tl.load(slots + (TAPS - 1 - BACK), mask=known & at_first, other=0.0).to(tl.float32)
    given = tl.load(place - BACK * x_stride, mask=live & (at_first == 0), other=0.0).to(tl.float32)
    return tl.where(at_first, stored, given)


@triton.jit
def _tap(weight, c, live, BACK: tl.constexpr, TAPS: tl.constexpr):
    """The weight of the input BACK tokens ago, fp32."""
    if BACK >= TAPS:
        return tl.zeros(c.shape, tl.float32)
    return tl.load(weight + c * TAPS + (TAPS - 1 - BACK), mask=live, other=0.0).to(tl.float32)


@triton.jit
def _store_state(goal, x, slots, c, start, upto, live, known, x_stride, REACH: tl.constexpr, IN_PLACE: tl.constexpr):
    """The last REACH inputs before token `upto` of a sequence to `goal`: from x, and from its old state where `upto` is nearer
    to the start than that. IN_PLACE: `goal` is that state."""
    for j in tl.static_range(REACH):
        source = upto - REACH + j
        # Slot j takes what slot j + n held before (n new tokens); ascending j reads it before it is replaced.
        old = tl.load(slots + j + (upto - start), mask=live & known & (source < start), other=0.0)
        new = tl.load(x + source.to(tl.int64) * x_stride + c, mask=live & (source >= start), other=0.0)
        value = tl.where(source < start, old, new.to(goal.dtype.element_ty))
        if IN_PLACE:  # all threads have read the slot, here and for the convolution, before one writes it
            tl.debug_barrier()
        tl.store(goal + j, value, mask=live)
