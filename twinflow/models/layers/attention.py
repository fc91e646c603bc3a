"""Grouped-query attention over the paged cache, with optional q/k norms, rotary embedding and output gate."""

from dataclasses import dataclass

import torch

from twinflow.kernels.base import HeadNorm, KernelSet
from twinflow.models.step import Step


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer. `qkv` rows are [q (heads * head_dim) | gate (the same, if `gated`) | k | v (kv_heads *
    head_dim each)]; `out` (hidden, heads * head_dim). Rotary embedding is applied when the step carries angles."""

    kernels: KernelSet
    index: int  # among the layers of the attention group
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    gated: bool
    qkv: torch.Tensor
    out: torch.Tensor
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None

    def __call__(self, x: torch.Tensor, step: Step, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        ops, batch, tokens = self.kernels, step.batch, x.shape[0]
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = ops.linear(x, self.qkv).split([width, width * self.gated, kv_width, kv_width], dim=-1)
        q = parts[0].view(tokens, self.heads, self.head_dim)
        k = parts[2].view(tokens, self.kv_heads, self.head_dim)
        v = parts[3].view(tokens, self.kv_heads, self.head_dim)
        k_cache = step.views("attention", "k", self.index)
        v_cache = step.views("attention", "v", self.index)
        q = ops.attention_inputs(
            q, k, v, self.q_norm, self.k_norm, step.cos, step.sin, k_cache, v_cache, batch.kv_slots
        )
        y = ops.paged_attention(
            q,
            k_cache,
            v_cache,
            batch.block_tables,
            batch.context_lens,
            batch.cu_seqlens,
            batch.seq_lens,
            self.scale,
            gate=parts[1] if self.gated else None,
            shared=batch.shared,
            host_contexts=batch.host_contexts,
        ).view(tokens, width)
        return ops.linear_residual(y, self.out, residual)
