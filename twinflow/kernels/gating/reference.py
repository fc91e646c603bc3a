"""Elementwise gates in plain torch."""

import torch
import torch.nn.functional as F


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(gate)`; same shapes and dtype (attention's output gate)."""
    return x * torch.sigmoid(gate)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` (Shazeer 2020). gate_up (..., 2n), gate first; returns (..., n)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
