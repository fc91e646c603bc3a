"""The ceilings of a device, measured on it: memory copied, memory read, matrix products."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

REPEATS = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """`copy`: bytes read and bytes written per second while a large array is read and another one written. `read`: bytes
    per second of a sum over a large array. `operations`: of a large matrix product, two for each multiply and add."""

    copy_bytes_per_s: float
    read_bytes_per_s: float
    operations_per_s: float

    def least_s(self, moved_bytes: float, operations: float) -> float:
        """No work that moves so much and computes so much takes less: the larger of both, as if the other were free."""
        return max(moved_bytes / self.copy_bytes_per_s, operations / self.operations_per_s)


def measure_rates(device: str, dtype: torch.dtype) -> Rates:
    """Takes under a second on a GPU. Matrix products are of `dtype`, of random values."""
    on_gpu = torch.device(device).type == "cuda"
    size, side = (1 << 30, 8192) if on_gpu else (1 << 25, 512)  # far beyond every cache of a GPU
    copied, read = _memory_rates(device, size)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Rates(copied, read, 2 * side**3 / best_s(lambda: a @ b, device))


def _memory_rates(device: str, size: int) -> tuple[float, float]:
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    # A kernel of its own rather than a copy: drivers may do a copy in another way.
    copied = 2 * size / best_s(lambda: torch.neg(source, out=target), device)
    return copied, size / best_s(lambda: source.sum(), device)


def best_s(run: Callable[[], object], device: str) -> float:
    """The shortest of several runs, after one that does not count."""
    run()
    if torch.device(device).type != "cuda":
        return min(_wall_s(run) for _ in range(REPEATS))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3


def _wall_s(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
