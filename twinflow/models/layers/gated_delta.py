"""Gated DeltaNet: convolution, gated delta rule, gated norm; its state lives in the sequence's slot."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from twinflow.kernels.base import KernelSet
from twinflow.models.step import Step, Wanted


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """One Gated DeltaNet layer. `in_proj` rows are [q (Hk * K) | k (Hk * K) | v (Hv * V) | z (Hv * V) | b (Hv) |
    a (Hv)], heads in order, nothing interleaved; `conv` (2 * Hk * K + Hv * V, W) runs over q|k|v."""

    writes_cache: ClassVar[bool] = True

    kernels: KernelSet
    index: int  # among the layers of the state group
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float
    in_proj: torch.Tensor
    conv: torch.Tensor
    a_log: torch.Tensor  # (Hv,) fp32
    dt_bias: torch.Tensor  # (Hv,) fp32
    norm: torch.Tensor  # (V,)
    out: torch.Tensor  # (hidden, Hv * V)

    def __call__(
        self, x: torch.Tensor, step: Step, residual: torch.Tensor, wanted: Wanted | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ops, batch, tokens = self.kernels, step.batch, x.shape[0]
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        mixed, z, b, a = ops.linear(x, self.in_proj).split(
            [2 * keys + values, values, self.value_heads, self.value_heads], dim=-1
        )
        conv_state, state = step.views("state", "conv", self.index), step.views("state", "temporal", self.index)
        if tokens == len(batch.seq_lens) and max(batch.seq_lens) == 1:
            y = ops.gated_delta_decode(
                mixed,
                z,
                a,
                b,
                self.conv,
                conv_state,
                self.a_log,
                self.dt_bias,
                state,
                self.norm,
                batch.state_rows,
                batch.fresh,
                self.eps,
            )
            if wanted is not None:
                y, residual = wanted.rows(y, residual)
            return ops.linear_residual(y, self.out, residual)
        where = (batch.state_rows, batch.fresh, batch.cu_seqlens, batch.seq_lens)
        mixed = ops.causal_conv1d(mixed, self.conv, None, conv_state, *where, snapshots=batch.snapshots)
        q, k, v = mixed.split([keys, keys, values], dim=-1)
        y = ops.gated_delta(
            q.view(tokens, self.key_heads, self.key_dim),
            k.view(tokens, self.key_heads, self.key_dim),
            v.view(tokens, self.value_heads, self.value_dim),
            a,
            b,
            self.a_log,
            self.dt_bias,
            state,
            *where,
            snapshots=batch.snapshots,
        )
        z = z.view(tokens, self.value_heads, self.value_dim)
        if wanted is not None:
            y, z, residual = wanted.rows(y, z, residual)
        y = ops.gated_rms_norm(y, z, self.norm, self.eps)
        return ops.linear_residual(y.view(-1, values), self.out, residual)
