"""Gate, then RMS norm over groups of channels, on a GPU: one program per row and group. Semantics: `reference.py`."""

import torch
import triton
import triton.language as tl

from twinflow.kernels.norms.triton import as_rows
from twinflow.kernels.triton_tools import power_of_2, sigmoid


def gated_group_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    outer, inner, x_outer, x_inner = as_rows(x)
    _, _, gate_outer, gate_inner = as_rows(gate)
    n = x.shape[-1]
    width = power_of_2(n // groups)
    _norm_groups[(outer * inner, groups)](
        x,
        gate,
        weight,
        out,
        x_outer,
        x_inner,
        gate_outer,
        gate_inner,
        eps,
        INNER=inner,
        N=n,
        SIZE=n // groups,
        WIDTH=width,
        num_warps=4 if width <= 2048 else 8,
    )
    return out


@triton.jit
def _norm_groups(
    x,
    gate,
    weight,
    out,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    eps,
    INNER: tl.constexpr,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    live = col < SIZE
    at = tl.program_id(1) * SIZE + col
    h = tl.load(x + (row // INNER) * x_outer + (row % INNER) * x_inner + at, mask=live, other=0.0).to(tl.float32)
    z = tl.load(gate + (row // INNER) * gate_outer + (row % INNER) * gate_inner + at, mask=live, other=0.0)
    z = z.to(tl.float32)
    h = h * z * sigmoid(z)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / SIZE + eps)
    h = h * tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * N + at, h.to(out.dtype.element_ty), mask=live)
