"""RMS norms on a GPU: one pass over each row, all arithmetic in fp32. Semantics: `reference.py`.

Rows are taken as they lie: (outer, inner, n) with any outer and inner stride, so that q and k heads inside a fused
projection are normed without a copy. Values are rounded once, at the end (the reference rounds between norm and weight).
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from twinflow.kernels.triton_tools import power_of_2, sigmoid


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(x, weight, eps, unit_offset=False)


def rms_norm_unit_offset(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(x, weight, eps, unit_offset=True)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(x, weight, eps, unit_offset=False, gate=gate)


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return total, _launch(x, weight, eps, unit_offset=unit_offset, added=y, total=total)


def as_rows(x: torch.Tensor) -> tuple[int, int, int, int]:
    """(outer, inner, stride of outer, stride of inner) of x (..., n); copies nothing. Raises ValueError for layouts that
    need more than two strides."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"the last dim must be contiguous, strides are {x.stride()}")
    if x.ndim == 1:
        return 1, 1, 0, 0
    if x.ndim == 2:
        return x.shape[0], 1, x.stride(0), 0
    if x.ndim == 3:
        return x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    flat = x.view(-1, x.shape[-2], x.shape[-1])
    return flat.shape[0], flat.shape[1], flat.stride(0), flat.stride(1)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    unit_offset: bool,
    gate: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    outer, inner, x_outer, x_inner = as_rows(x)
    other, parts = gate if gate is not None else added, 1
    part_stride = 0
    if added is not None and added.ndim > x.ndim:
        parts, part_stride, other = added.shape[0], added.stride(0), added[0]
    _, _, other_outer, other_inner = as_rows(other) if other is not None else (0, 0, 0, 0)
    n = x.shape[-1]
    width = power_of_2(n)
    rows = max(1, min(16, 1024 // width))
    early = dependent_launch(x.device)
    _norm_rows[(triton.cdiv(outer * inner, rows),)](
        x,
        other if other is not None else x,
        weight,
        out,
        total if total is not None else out,
        outer * inner,
        x_outer,
        x_inner,
        other_outer,
        other_inner,
        part_stride,
        eps,
        INNER=inner,
        N=n,
        WIDTH=width,
        ROWS=rows,
        UNIT_OFFSET=unit_offset,
        GATED=gate is not None,
        ADDED=parts if added is not None else 0,
        EARLY=early,
        launch_pdl=early,
        num_warps=4 if width <= 2048 else 8,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _norm_rows(
    x,
    other,
    weight,
    out,
    total,
    rows,
    x_outer,
    x_inner,
    other_outer,
    other_inner,
    part_stride,
    eps,
    INNER: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, WIDTH)
    live = (row < rows)[:, None] & (col < N)[None, :]
    scale = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    at = ((row // INNER) * x_outer + (row % INNER) * x_inner)[:, None] + col[None, :]
    value = tl.load(x + at, mask=live, other=0.0)
    place = (row * N)[:, None] + col[None, :]
    other_at = ((row // INNER) * other_outer + (row % INNER) * other_inner)[:, None] + col[None, :]
    if ADDED > 0:
        more = tl.load(other + other_at, mask=live, other=0.0).to(tl.float32)
        for part in tl.static_range(1, ADDED):
            more += tl.load(other + part * part_stride + other_at, mask=live, other=0.0)
        # Rounded before it is normed: the residual stream that later layers see is the one normed here.
        value = (value.to(tl.float32) + more).to(value.dtype)
        tl.store(total + place, value, mask=live)
    h = value.to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, 1) / N + eps)[:, None]
    if UNIT_OFFSET:
        scale = scale + 1.0
    h = h * scale[None, :]
    if GATED:
        z = tl.load(other + other_at, mask=live, other=0.0).to(tl.float32)
        h = h * z * sigmoid(z)
    tl.store(out + place, h.to(out.dtype.element_ty), mask=live)
