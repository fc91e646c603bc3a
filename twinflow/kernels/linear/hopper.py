"""The gate and up products with SwiGLU at their end, for many tokens, on Hopper's matrix units. Semantics: `reference.py`.

A program stays on its multiprocessor and takes tile after tile. One warp loads (tensor memory accelerator, a ring of
stages); two warpgroups multiply, each its own 64 tokens by all columns of the tile, and put silu(gate) * up out through
shared memory, so that the two products are never written. Written in Gluon, since Triton cannot give warps different work
here. Descriptors of the tensors are made on the host and are parameters of the launch: a CUDA graph keeps them.
"""

import torch
import triton

from twinflow.kernels.triton_tools import multiprocessors, runs_gluon

MIN_TOKENS = 1024  # from so many on it is faster than the product and the activation apart (docs/performance.md)
GROUPS = 2  # warpgroups that multiply
TOKENS = 64  # of a warpgroup
COLUMNS = 128  # of a tile: so many gates and the same ups, one instruction's 256
STEP = 64  # of a stage: 128 bytes of each row, what shared memory swizzles
STAGES = 4  # on their way or in use
LAG = 2  # stages between the warpgroups, so that one multiplies while the other is at its end of a tile
SIDE = 16  # tiles of tokens that walk the columns together
REGISTERS = 168  # of each thread at the start: three warpgroups' share
MULTIPLIER_REGISTERS = 240  # once the loading warp has given its own away
LOADER_REGISTERS = 24


def can_run(x: torch.Tensor, gate_up: torch.Tensor) -> bool:
    """Whether the kernel takes these: x (T, in), gate_up (2n, in) contiguous. Rows have to start at multiples of 16 bytes,
    and to be long enough for the second warpgroup's lag."""
    return (
        runs_gluon(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and gate_up.dtype == x.dtype
        and gate_up.is_contiguous()
        and x.stride(1) == 1
        and x.stride(0) >= x.shape[1] > LAG * STEP
        and all(n % 8 == 0 for n in (x.shape[1], x.stride(0), gate_up.shape[0] // 2))
        and x.data_ptr() % 16 == gate_up.data_ptr() % 16 == 0
    )


def faster(x: torch.Tensor, gate_up: torch.Tensor) -> bool:
    """Whether `project_gated` is to take these."""
    return x.shape[0] >= MIN_TOKENS and can_run(x, gate_up)


def project_gated(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """x (T, in) with any row stride, gate_up (2n, in), as `can_run` wants them, T > 0 -> (T, n)."""
    from twinflow.kernels.linear import hopper_kernel as kernel

    tokens, inner = x.shape
    columns = gate_up.shape[0] // 2
    out = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(tokens, GROUPS * TOKENS) * triton.cdiv(columns, COLUMNS)
    kernel.project_gated[(min(tiles, multiprocessors(x.device)),)](
        kernel.describe(x, TOKENS, STEP),
        kernel.describe(gate_up, COLUMNS, STEP),
        kernel.describe(out, TOKENS, COLUMNS),
        tokens,
        columns,
        inner,
        num_warps=4,
        maxnreg=REGISTERS,
    )
    return out
