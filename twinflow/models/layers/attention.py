"""Grouped-query attention over the paged cache, with optional q/k norms, rotary embedding and output gate."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from twinflow.kernels.base import HeadNorm, KernelSet
from twinflow.models.step import Step, Wanted


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer. `qkv` rows are [q (heads * head_dim) | gate (the same, if `gated`) | k | v (kv_heads *
    head_dim each)]; `out` (hidden, heads * head_dim). Rotary embedding is applied when the step carries angles."""

    writes_cache: ClassVar[bool] = True

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

    def __call__(
        self, x: torch.Tensor, step: Step, residual: torch.Tensor, wanted: Wanted | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if wanted is not None:
            return self._last(x, step, residual, wanted)
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

    def _last(
        self, x: torch.Tensor, step: Step, residual: torch.Tensor, wanted: Wanted
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V of all tokens; everything else of the wanted ones, which attend as single tokens of their sequences do."""
        ops = self.kernels
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        of_q = width + width * self.gated
        caches = step.views("attention", "k", self.index), step.views("attention", "v", self.index)
        k, v = (
            part.view(-1, self.kv_heads, self.head_dim)
            for part in ops.linear(x, self.qkv[of_q:]).split([kv_width, kv_width], dim=-1)
        )
        ops.attention_inputs(None, k, v, None, self.k_norm, step.cos, step.sin, *caches, step.batch.kv_slots)
        x, residual = wanted.rows(x, residual)
        tokens = len(wanted.at)
        parts = ops.linear(x, self.qkv[:of_q]).split([width, of_q - width], dim=-1)
        q = parts[0].view(tokens, self.heads, self.head_dim)
        q = ops.attention_inputs(q, None, None, self.q_norm, None, wanted.cos, wanted.sin, *caches, None)
        y = ops.paged_attention(
            q,
            *caches,
            wanted.block_tables,
            wanted.context_lens,
            wanted.cu_seqlens,
            (1,) * tokens,
            self.scale,
            gate=parts[1] if self.gated else None,
        ).view(tokens, width)
        return ops.linear_residual(y, self.out, residual)
