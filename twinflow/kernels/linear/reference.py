"""Projections in plain torch."""

import torch
import torch.nn.functional as F


def linear(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T`. x (T, in) with any row stride, weight (out, in); returns (T, out) contiguous in `dtype` (None: x's),
    written to `out` where it is given."""
    product = F.linear(x, weight).to(dtype or x.dtype)
    return product if out is None else out.copy_(product)


def linear_residual(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`residual + x @ weight.T`, as a sum or for a reader that can sum up: the residual (T, out), and what is to be added to
    it: None, (T, out) like x, or parts of it (P, T, out) fp32. The residual may be written in place."""
    return residual, F.linear(x, weight)


def linear_swiglu(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate x) * up x` (Shazeer 2020). x (T, in), gate_up (2n, in) with the gate's rows first; returns (T, n)."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.silu(gate) * up
