"""What every layer sees of one forward pass: the batch, the cache and what is computed once per pass."""

from dataclasses import dataclass
from typing import Protocol

import torch

from twinflow.cache.arena import Arena
from twinflow.models.base import ForwardBatch


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. `cos`, `sin` (T, rotary_dim / 2) fp32, None for models without rotary embedding."""

    batch: ForwardBatch
    arena: Arena
    cos: torch.Tensor | None
    sin: torch.Tensor | None

    def views(self, group: str, tensor: str, index: int) -> torch.Tensor:
        """The cache of one layer: `index` counts the layers of its group, not of the model."""
        return self.arena.layers(group, tensor)[index]


class Mixer(Protocol):
    """What sits inside a residual block: attention, a state layer or an MLP. May update the step's cache in place."""

    def __call__(self, x: torch.Tensor, step: Step, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (T, hidden), normed; residual (T, hidden). Returns the residual and what is to be added to it, as
        `KernelSet.linear_residual` does."""
        ...


class Norm(Protocol):
    """A norm with its weight bound: (..., n) -> (..., n), same dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x + y` and its norm; y like x, or parts of it (P, ..., n)."""
        ...
