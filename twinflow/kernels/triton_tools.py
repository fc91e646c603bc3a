"""What the Triton kernels share: launch arithmetic on the host, small device functions.

Packed batches are cut into blocks of SIZE tokens without the host: a grid of `T // SIZE + B` programs covers every
sequence, and `find_sequence` tells a program which one it serves (some find themselves past the end and return).
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

EXACT = "tf32x3"  # fp32 operands: three tf32 products, as good as fp32
FAST = "tf32"


def power_of_2(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least n and `least` (matrix instructions want 16 or more)."""
    return max(least, triton.next_power_of_2(n))


def dot_precision(dtype: torch.dtype) -> str:
    """How `tl.dot` treats fp32 operands when the tensors are of `dtype`; half types are exact in any case."""
    return EXACT if dtype == torch.float32 else FAST


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 for the interpreter on a CPU, so that tests see several splits."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program can have; decides how many tiles are loaded ahead."""
    if device.type != "cuda":
        return 99 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


@lru_cache
def runs_gluon(device: torch.device) -> bool:
    """Whether the kernels written in Gluon run there: Hopper alone has what they multiply with, and Gluon still changes with
    each release of Triton."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and triton.__version__.split(".")[:2] == ["3", "6"]
    )


@triton.jit
def find_sequence(cu_seqlens, sequences, block, SIZE: tl.constexpr):
    """The largest s with `cu_seqlens[s] // SIZE + s <= block`: sequence s owns the blocks from there on."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // SIZE + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def softplus(x):
    """log(1 + exp(x)) in fp32, to a few ulp also where exp(x) is tiny."""
    z = tl.exp(-tl.abs(x))
    # log(1 + z) loses the digits of a small z, so a series takes over there (next term: z^7 / 7).
    series = z * (1.0 - z * (0.5 - z * (1.0 / 3 - z * (0.25 - z * (0.2 - z / 6)))))
    return tl.maximum(x, 0.0) + tl.where(z < 0.06, series, tl.log(1.0 + z))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
