"""What every layer sees of one forward pass: the batch, the cache and what is computed once per pass."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

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

    def wanted(self) -> "Wanted":
        """The tokens that need logits. Contexts are those of padding where their sequence is."""
        batch, at = self.batch, self.batch.logit_rows
        sequence = torch.searchsorted(batch.cu_seqlens, at.to(torch.int32), right=True) - 1
        return Wanted(
            at=at,
            cos=None if self.cos is None else self.cos.index_select(0, at),
            sin=None if self.sin is None else self.sin.index_select(0, at),
            context_lens=torch.minimum(
                batch.positions.index_select(0, at) + 1, batch.context_lens.index_select(0, sequence)
            ).to(torch.int32),
            block_tables=batch.block_tables.index_select(0, sequence),
            cu_seqlens=torch.arange(len(at) + 1, dtype=torch.int32, device=at.device),
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """R tokens of a pass, each taken as a sequence of one token whose K and V are written. `at` (R,) int64 are their places
    in the batch; angles, contexts (R,) int32, tables (R, blocks) and `cu_seqlens` (R + 1,) as in `ForwardBatch`."""

    at: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens: torch.Tensor

    def rows(self, *of_all: torch.Tensor) -> list[torch.Tensor]:
        """Their rows of tensors (T, ...)."""
        return [x.index_select(0, self.at) for x in of_all]


class Mixer(Protocol):
    """What sits inside a residual block: attention, a state layer or an MLP. `writes_cache`: updates the step's cache in
    place."""

    writes_cache: ClassVar[bool]

    def __call__(
        self, x: torch.Tensor, step: Step, residual: torch.Tensor, wanted: Wanted | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (T, hidden), normed; residual (T, hidden). Returns the residual and what is to be added to it, as
        `KernelSet.linear_residual` does; with `wanted`, of those tokens alone, though the cache is updated for all."""
        ...


class Norm(Protocol):
    """A norm with its weight bound: (..., n) -> (..., n), same dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x + y` and its norm; y like x, or parts of it (P, ..., n)."""
        ...
