"""The decoder: embedding, residual blocks, final norm, head. Every family builds one; nothing here knows which."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from twinflow.cache.arena import Arena
from twinflow.contracts.groups import CacheLayout
from twinflow.kernels.base import KernelSet
from twinflow.models.base import ForwardBatch
from twinflow.models.step import Mixer, Norm, Step, Wanted

# Of so many tokens to each one with logits on, the others are left out at the end; finding the places costs something too.
FEW = 2


@dataclass(frozen=True, slots=True)
class ResidualBlock:
    """`x + mixer(norm(x))`; one for each mixer and each MLP of the model.

    The sum is made by the mixer's last product, or left to the norm that comes next, which reads it anyway: blocks hand on
    `x` and what is still to be added to it, whole, in parts or nothing.
    """

    norm: Norm
    mixer: Mixer

    def __call__(
        self, x: torch.Tensor, added: torch.Tensor | None, step: Step, wanted: Wanted | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, normed = (x, self.norm(x)) if added is None else self.norm.add(x, added)
        return self.mixer(normed, step, x, wanted)


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
    def forward(self, batch: ForwardBatch, arena: Arena, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (R, vocab) fp32 for `batch.logit_rows`; K/V and states are written to the arena in place.

        Behind the last block that writes to the cache nobody reads a token without logits. Of a prompt that is all but
        one, so from within that block on only those with logits are computed.
        """
        cos = sin = None
        if self.inv_freq is not None:
            cos, sin = self.kernels.rotary_angles(batch.positions, self.inv_freq)
        step = Step(batch, arena, cos, sin)
        x, added = F.embedding(batch.input_ids, self.embedding), None
        rows = len(batch.logit_rows)
        few = FEW * rows <= len(batch.input_ids)
        last = max(i for i, block in enumerate(self.blocks) if block.mixer.writes_cache)
        for i, block in enumerate(self.blocks):
            x, added = block(x, added, step, step.wanted() if few and i == last else None)
            if i == last and rows == 0:
                return torch.empty(0, self.vocab_size, device=x.device) if out is None else out[:0]
        if not few:
            x = x.index_select(0, batch.logit_rows)
            added = None if added is None else added.index_select(-2, batch.logit_rows)
        normed = self.norm(x) if added is None else self.norm.add(x, added)[1]
        return self.kernels.linear(normed, self.head, torch.float32, out)
