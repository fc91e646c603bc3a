"""Bans what the masks of a step do not allow, with plain torch, so that it is the same on every device."""

import torch


def masked(logits: torch.Tensor, picks: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """A copy of logits (n, V) with -inf for whatever `bits` (m, words) int32 does not allow in rows `picks` (m,) int64."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits.unsqueeze(-1) >> shifts & 1).bool().flatten(1)[:, : logits.shape[1]]
    out = logits.clone()
    out.index_copy_(0, picks, logits.index_select(0, picks).masked_fill_(~allowed, float("-inf")))
    return out
