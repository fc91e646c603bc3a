# ruff: noqa: B023 (each closure runs before the loop goes on)
"""Mamba-2: selective-state updates and chunks."""

import torch

from benchmarks.kernels.shapes import MG, MH, MN, MP, bf16, shape_of, state_of
from benchmarks.kernels.timing import Bench
from twinflow.kernels.mamba2_ssd.triton import mamba2_ssd


def mamba(bench: Bench) -> None:
    for lens in ((1,) * 32, (1,) * 256, (4096,), (16384,)):
        tokens = sum(lens)
        x, b, c = bf16(tokens, MH * MP + 2 * MG * MN).split([MH * MP, MG * MN, MG * MN], 1)
        x, b, c = x.unflatten(1, (MH, MP)), b.unflatten(1, (MG, MN)), c.unflatten(1, (MG, MN))
        heads = [
            torch.rand(MH, device="cuda").add(1).log(),
            torch.randn(MH, device="cuda"),
            torch.randn(MH, device="cuda"),
        ]
        where, dt = state_of(lens, MH, MP, MN), bf16(tokens, MH)
        moved = 2 * tokens * (2 * MH * MP + 2 * MG * MN) + 8 * len(lens) * MH * MP * MN
        operations = 0 if lens[0] == 1 else 2 * tokens * MH * (64 * (MN + MP) + 2 * MP * MN)
        bench.add(
            "mamba-2 ssd", shape_of(lens), lambda: mamba2_ssd(x, b, c, dt, *heads, *where, lens), moved, operations
        )
