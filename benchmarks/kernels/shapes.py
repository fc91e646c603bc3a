"""The shapes timed: a 4B hybrid (24 Gated DeltaNet, 8 attention layers) and the Mamba-2 layers of a 30B hybrid."""

import torch

HIDDEN, FFN = 2560, 9216
HEADS, KV_HEADS, DIM, ROTARY, BLOCK = 16, 4, 256, 64, 64
HK, HV, K = 16, 32, 128  # Gated DeltaNet; V = K
MH, MP, MN, MG = 64, 64, 128, 8  # Mamba-2: heads, head dim, state dim, groups


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def lens_on_device(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lens], device="cuda").cumsum(0).to(torch.int32)


def state_of(lens: tuple[int, ...], *shape: int) -> tuple[torch.Tensor, ...]:
    """A pool with a gap between rows, its rows in a scattered order, fresh flags and prefix sums."""
    pool = torch.randn(len(lens) + 1, 2, *shape, device="cuda")[:, 1]
    rows = torch.randperm(len(lens), device="cuda") + 1
    return pool, rows, torch.zeros(len(lens), dtype=torch.bool, device="cuda"), lens_on_device(lens)


def caches(blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer in blocks of several, as in the arena."""
    both = torch.empty(blocks, 4, 2, KV_HEADS, BLOCK, DIM, dtype=torch.bfloat16, device="cuda").normal_()[:, 1]
    return both[:, 0], both[:, 1]


def shape_of(lens: tuple[int, ...]) -> str:
    if lens[0] == 1:
        return f"B={len(lens)}"
    return f"T={lens[0]}" if len(lens) == 1 else f"T={len(lens)} x {lens[0]}"
