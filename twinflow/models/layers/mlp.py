"""Dense feed-forward layers."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from twinflow.kernels.base import KernelSet
from twinflow.models.step import Step, Wanted


@dataclass(frozen=True, slots=True)
class SwiGluMlp:
    """`down(silu(gate x) * up x)`; gate_up (2 * intermediate, hidden), gate rows first; down (hidden, intermediate)."""

    writes_cache: ClassVar[bool] = False

    kernels: KernelSet
    gate_up: torch.Tensor
    down: torch.Tensor

    def __call__(
        self, x: torch.Tensor, step: Step, residual: torch.Tensor, wanted: Wanted | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.kernels.linear_residual(self.kernels.linear_swiglu(x, self.gate_up), self.down, residual)


@dataclass(frozen=True, slots=True)
class SquaredReluMlp:
    """`down(relu(up x)^2)` (So et al. 2021, Primer); up (intermediate, hidden), down (hidden, intermediate)."""

    writes_cache: ClassVar[bool] = False

    kernels: KernelSet
    up: torch.Tensor
    down: torch.Tensor

    def __call__(
        self, x: torch.Tensor, step: Step, residual: torch.Tensor, wanted: Wanted | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.kernels.linear_residual(F.relu(self.kernels.linear(x, self.up)).square(), self.down, residual)
