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


def fused(*parts: torch.Tensor) -> list[torch.Tensor]:
    """The parts (T, ..) as views into the rows of one projection, with something on both sides."""
    flat = [p.flatten(1) for p in parts]
    pad = flat[0].new_full((flat[0].shape[0], 8), float("nan"))
    row = torch.cat([pad, *flat, pad], 1)
    views = row.split([8, *(f.shape[1] for f in flat), 8], 1)[1:-1]
    return [v.unflatten(1, p.shape[1:]) if p.ndim > 2 else v for v, p in zip(views, parts, strict=True)]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value; NaN where `got` has NaN."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    got, expected = got.detach().cpu().float(), expected.detach().cpu().float()
    return float((got - expected).abs().max() / expected.abs().max())
