"""Packed batches and NaN-filled memory for the kernel tests."""

from collections.abc import Sequence

import torch

SPLITS = ((1, 128), (63, 66), (64, 65), (65, 64), (128, 1), (1, 1, 1, 126), (7, 57, 65))  # each of 129 tokens


def cu(lens: Sequence[int]) -> torch.Tensor:
    """Prefix sums (B+1,) int32 of tokens per sequence."""
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def nan_pool(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A state pool of uninitialised memory with a gap between rows, as the arena's views have."""
    return torch.full((rows, 2, *shape), float("nan"), dtype=dtype)[:, 0]


def bools(*values: bool) -> torch.Tensor:
    return torch.tensor(values)


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values)
