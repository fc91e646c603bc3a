"""Mixtures of experts as far as they are built: what a config says of them, and layers that can be sized but not run."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from twinflow.contracts.errors import Unsupported
from twinflow.models.step import Step, Wanted


@dataclass(frozen=True, slots=True)
class Experts:
    """`layers` have `count` experts of width `intermediate`, `active` of them for a token, and one shared expert, which
    every token passes. `latent`: the width that routed experts work on, None = the model's."""

    layers: tuple[int, ...]
    count: int
    active: int
    intermediate: int
    shared_intermediate: int
    latent: int | None = None


@dataclass(frozen=True, slots=True)
class SizedExperts:
    """A mixer with its weights, `live` elements of which are in use per token. Running it is refused."""

    writes_cache: ClassVar[bool] = False

    weights: tuple[torch.Tensor, ...]
    live: int

    def __call__(
        self, x: torch.Tensor, step: Step, residual: torch.Tensor, wanted: Wanted | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise Unsupported("mixtures of experts are not supported; only dense models are")
