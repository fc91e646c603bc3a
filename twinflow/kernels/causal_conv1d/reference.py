"""Causal depthwise convolution over packed sequences, in plain torch.

The state of a sequence is its last W-1 inputs, oldest first, left-padded with zeros; so n inputs at once equal any
split of them; the state's bits are the same where it keeps x's dtype.
"""

import torch
import torch.nn.functional as F

from twinflow.kernels.base import Snapshots
from twinflow.kernels.rows import load_rows, store_rows
from twinflow.kernels.varlen import split_batch


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
) -> torch.Tensor:
    """`y[t] = silu(bias + sum_j weight[:, j] * x[t - (W-1) + j])` per channel, reaching back into the state.

    x (T, C); weight (C, W); bias (C,) or None; state (R, C, W-1), updated in place; state_rows (B,) int64, -1 = start
    from zeros and store nothing; fresh (B,) bool, True = start from zeros; cu_seqlens (B+1,) int32 and seq_lens, the
    same on the host; snapshots: more rows of `state` to write. Taps and activation in fp32. Returns (T, C) in x.dtype.
    """
    taps = weight.float().t()  # (W, C): one row per tap, so that a tap is a contiguous vector
    before = load_rows(state, state_rows, fresh).transpose(1, 2)  # (B, W-1, C)
    if len(seq_lens) == x.shape[0] and split_batch(seq_lens).all_single:
        window = torch.cat([before, x.float()[:, None]], dim=1)  # (B, W, C)
        y = _tap_sum(window, taps)[:, 0]
        after = window[:, 1:]
    else:
        y, line = _packed(x.float(), taps, before, cu_seqlens, seq_lens)
        sequences = torch.arange(len(seq_lens), device=x.device)
        after = _reach(line, before.shape[1], sequences, cu_seqlens[1:])
        if snapshots is not None:
            kept = torch.repeat_interleave(sequences, snapshots.starts.diff().long())
            ends = cu_seqlens[kept] + snapshots.after[: len(kept)]
            store_rows(state, snapshots.rows[: len(kept)], _reach(line, before.shape[1], kept, ends).transpose(1, 2))
    store_rows(state, state_rows, after.transpose(1, 2))
    if bias is not None:
        y = y + bias.float()
    return (F.silu(y) if activation else y).to(x.dtype)


def _packed(
    x: torch.Tensor, taps: torch.Tensor, before: torch.Tensor, cu_seqlens: torch.Tensor, seq_lens: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lays the state in front of each sequence and convolves the whole line once; rows that mix two sequences are
    computed and dropped. Returns y (T, C) and the line (T + B * (W-1), C)."""
    reach = before.shape[1]
    pieces = []
    for i, piece in enumerate(x.split(list(seq_lens))):
        pieces += [before[i], piece]
    line = torch.cat(pieces)[None]  # (1, T + B*(W-1), C)
    y = _tap_sum(line, taps)[0]
    sequences = torch.arange(len(seq_lens), device=x.device)
    lengths = cu_seqlens.diff().long()
    if len(seq_lens) > 1:
        shift = torch.repeat_interleave(sequences, lengths, output_size=x.shape[0]) * reach
        y = y[torch.arange(x.shape[0], device=x.device) + shift]
    return y, line[0]


def _reach(line: torch.Tensor, reach: int, sequences: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The W-1 inputs before token `ends` (n,) of the batch in `sequences` (n,): (n, W-1, C)."""
    at = ends + sequences * reach
    return line[at[:, None] + torch.arange(reach, device=line.device)]


def _tap_sum(line: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """(n, L, C) with taps (W, C) -> (n, L-W+1, C)."""
    width = taps.shape[0]
    out = line.shape[1] - width + 1
    y = line[:, :out] * taps[0]
    for j in range(1, width):
        y.addcmul_(line[:, j : j + out], taps[j])
    return y
