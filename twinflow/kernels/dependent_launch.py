"""Programmatic dependent launch (Hopper on): a kernel starts while the one before it in the stream still runs.

A kernel launched with `launch_pdl=True` begins as soon as every program of the one before has ended or called
`let_next_start`, and must call `wait_for_previous` before it reads or writes anything that kernel may touch. Two rules keep
this the only condition: every program waits, also one that has nothing to do, so that no kernel ends before the one before
it; and it waits before it lets the next start, so that what starts early never runs beside more than one kernel. On other
GPUs and in the interpreter all of it is nothing.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl


@lru_cache
def dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Returns when all that the kernel before has written can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
