"""Gate first, then norm, in plain torch, fp32 inside. Gated DeltaNet does it the other way round (`norms`)."""

import torch
import torch.nn.functional as F


def gated_group_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """`weight * h / rms(h)` with `h = x * silu(gate)`; rms over each of `groups` equal runs of channels (Dao & Gu 2024,
    Mamba-2; one group is the plain gated norm).

    x, gate (..., n); weight (n,); n divisible by groups. The normalised value is rounded to x.dtype before the weight.
    Returns (..., n) in x.dtype.
    """
    h = x.float() * F.silu(gate.float())
    h = h.unflatten(-1, (groups, h.shape[-1] // groups))
    return weight.to(x.dtype) * F.rms_norm(h, h.shape[-1:], eps=eps).flatten(-2).to(x.dtype)
