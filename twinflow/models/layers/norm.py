"""Norms with their weight bound."""

from dataclasses import dataclass

import torch

from twinflow.kernels.base import KernelSet


@dataclass(frozen=True, slots=True)
class UnitOffsetNorm:
    """RMS norm scaled by 1 + weight; weight (n,)."""

    kernels: KernelSet
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm_unit_offset(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kernels.add_rms_norm(x, y, self.weight, self.eps, True)


@dataclass(frozen=True, slots=True)
class PlainNorm:
    """RMS norm scaled by weight; weight (n,)."""

    kernels: KernelSet
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kernels.add_rms_norm(x, y, self.weight, self.eps, False)
