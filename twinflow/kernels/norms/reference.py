"""RMS norms in plain torch. All work in fp32 whatever the input's dtype; weights may be of any float dtype."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * x / rms(x)` over the last dim (Zhang & Sennrich 2019).

    x (..., n); weight (n,). The normalised value is rounded to x.dtype before the weight, as Llama-like models do.
    Returns (..., n) in x.dtype.
    """
    return weight.to(x.dtype) * F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def rms_norm_unit_offset(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`(1 + weight) * x / rms(x)` over the last dim, wholly in fp32, rounded once at the end.

    x (..., n); weight (n,), stored around zero. Returns (..., n) in x.dtype.
    """
    return F.rms_norm(x.float(), x.shape[-1:], 1.0 + weight.float(), eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + y`, rounded to x's dtype, and its norm: `rms_norm_unit_offset` or `rms_norm`.

    x (..., n); y like x, or parts of it (P, ..., n) fp32 that are summed up here; weight (n,). Returns two tensors like x.
    """
    total = x + y if y.ndim == x.ndim else (x.float() + y.sum(0)).to(x.dtype)
    return total, (rms_norm_unit_offset if unit_offset else rms_norm)(total, weight, eps)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm first, then gate: `rms_norm(x) * silu(gate)`, per head (Gated DeltaNet's output norm).

    x, gate (..., n), n being one head's width; weight (n,). The gate is applied in fp32. Returns (..., n) in x.dtype.
    """
    return (rms_norm(x, weight, eps).float() * F.silu(gate.float())).to(x.dtype)
