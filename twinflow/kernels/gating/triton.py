"""Elementwise gates on a GPU, fp32 inside, rounded once at the end. Semantics: `reference.py`."""

import torch
import triton
import triton.language as tl

from twinflow.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from twinflow.kernels.triton_tools import sigmoid

BLOCK = 1024


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x, gate (T, n), each with any row stride."""
    return _launch(x, gate, x.shape[-1], silu=False)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up (T, 2n) with any row stride."""
    n = gate_up.shape[-1] // 2
    return _launch(gate_up[..., n:], gate_up[..., :n], n, silu=True)


def _launch(x: torch.Tensor, gate: torch.Tensor, n: int, *, silu: bool) -> torch.Tensor:
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = out.numel() // n
    grid, early = (rows, triton.cdiv(n, BLOCK)), dependent_launch(x.device)
    strides = x.stride(-2), gate.stride(-2)
    _gate[grid](x, gate, out, *strides, N=n, BLOCK=BLOCK, SILU=silu, EARLY=early, launch_pdl=early, num_warps=4)
    return out


@triton.jit
def _gate(
    x, gate, out, x_stride, gate_stride, N: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < N
    value = tl.load(x + row * x_stride + col, mask=live, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + col, mask=live, other=0.0).to(tl.float32)
    value = value * sigmoid(z)
    if SILU:
        value = value * z
    tl.store(out + row * N + col, value.to(out.dtype.element_ty), mask=live)
