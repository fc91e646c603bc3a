"""Mamba-2: convolution, selective state space, gated group norm; its state lives in the sequence's slot."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from twinflow.kernels.base import KernelSet
from twinflow.models.step import Step, Wanted


@dataclass(frozen=True, slots=True)
class Mamba2:
    """One Mamba-2 layer. `in_proj` rows are [z (H * P) | x (H * P) | B (G * N) | C (G * N) | dt (H)], heads and groups in
    order; `conv` (H * P + 2 * G * N, W) runs over x|B|C; the output norm is gated by z and spans one of G groups."""

    writes_cache: ClassVar[bool] = True

    kernels: KernelSet
    index: int  # among the layers of the state group
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    eps: float
    in_proj: torch.Tensor
    conv: torch.Tensor
    conv_bias: torch.Tensor | None  # (H * P + 2 * G * N,)
    a_log: torch.Tensor  # (H,) fp32
    dt_bias: torch.Tensor  # (H,) fp32
    skip: torch.Tensor  # (H,) fp32: D
    norm: torch.Tensor  # (H * P,)
    out: torch.Tensor  # (hidden, H * P)

    def __call__(
        self, x: torch.Tensor, step: Step, residual: torch.Tensor, wanted: Wanted | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ops, batch, tokens = self.kernels, step.batch, x.shape[0]
        width, shared = self.heads * self.head_dim, self.groups * self.state_dim
        z, mixed, dt = ops.linear(x, self.in_proj).split([width, width + 2 * shared, self.heads], dim=-1)
        conv_state = step.views("state", "conv", self.index)
        mixed = ops.causal_conv1d(
            mixed,
            self.conv,
            self.conv_bias,
            conv_state,
            batch.state_rows,
            batch.fresh,
            batch.cu_seqlens,
            batch.seq_lens,
            snapshots=batch.snapshots,
        )
        inputs, b, c = mixed.split([width, shared, shared], dim=-1)
        y = ops.mamba2_ssd(
            inputs.view(tokens, self.heads, self.head_dim),
            b.view(tokens, self.groups, self.state_dim),
            c.view(tokens, self.groups, self.state_dim),
            dt,
            self.a_log,
            self.dt_bias,
            self.skip,
            step.views("state", "temporal", self.index),
            batch.state_rows,
            batch.fresh,
            batch.cu_seqlens,
            batch.seq_lens,
            snapshots=batch.snapshots,
        )
        y = y.view(tokens, width)
        if wanted is not None:
            y, z, residual = wanted.rows(y, z, residual)
        return ops.linear_residual(ops.gated_group_norm(y, z, self.norm, self.groups, self.eps), self.out, residual)
