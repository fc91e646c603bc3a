"""The decoder: embedding, residual blocks, final norm, head. Every family builds one; nothing here knows which."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from twinflow.cache.arena import Arena
from twinflow.contracts.groups import CacheLayout
from twinflow.kernels.base import KernelSet
from twinflow.models.base import ForwardBatch
from twinflow.models.step import Mixer, Norm, Step


@dataclass(frozen=True, slots=True)
class ResidualBlock:
    """`x + mixer(norm(x))`; one for each mixer and each MLP of the model."""

    norm: Norm
    mixer: Mixer

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return x + self.mixer(self.norm(x), step)


@dataclass(slots=True)
class Decoder:
    """A `HybridModel`. embedding, head (vocab, hidden), the same tensor when tied; `inv_freq` (rotary_dim / 2,) fp32,
    None for models without rotary embedding."""

    layout: CacheLayout
    vocab_size: int
    max_model_tokens: int
    eos_token_ids: tuple[int, ...]
    kernels: KernelSet
    embedding: torch.Tensor
    blocks: tuple[ResidualBlock, ...]
    norm: Norm
    head: torch.Tensor
    inv_freq: torch.Tensor | None = None

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, arena: Arena) -> torch.Tensor:
        """Logits (R, vocab) fp32 for `batch.logit_rows`; K/V and states are written to the arena in place."""
        cos = sin = None
        if self.inv_freq is not None:
            cos, sin = self.kernels.rotary_angles(batch.positions, self.inv_freq)
        step = Step(batch, arena, cos, sin)
        x = F.embedding(batch.input_ids, self.embedding)
        for block in self.blocks:
            x = block(x, step)
        return F.linear(self.norm(x.index_select(0, batch.logit_rows)), self.head).float()
