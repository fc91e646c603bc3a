"""Time of a call in a CUDA graph, the card's ceilings, and the collector of results."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import triton

from benchmarks.kernels.shapes import bf16


@dataclass(frozen=True, slots=True)
class Result:
    kernel: str
    shape: str
    ms: float
    floor_ms: float

    @property
    def efficiency(self) -> float:
        return self.floor_ms / self.ms


@dataclass(frozen=True, slots=True)
class Rates:
    """Ceilings measured on this card."""

    bytes_per_s: float
    operations_per_s: float

    def floor_ms(self, moved_bytes: float, operations: float = 0.0) -> float:
        return 1e3 * max(moved_bytes / self.bytes_per_s, operations / self.operations_per_s)


class Timer:
    """Time of a call on the GPU alone, its inputs not in the L2 cache: graphs of (read 128 MiB, call) against graphs of the
    reads only. Reads leave no lines to be written back; what the call leaves is written back at its own cost."""

    def __init__(self) -> None:
        self._filler = torch.zeros(32 << 20, device="cuda")

    def __call__(self, run: Callable[[], object], budget_ms: float = 40.0) -> float:
        """Milliseconds per call, the median over replays that take about `budget_ms` together."""
        run()
        once = self._replay_ms(self._capture(run, 1))
        calls = max(1, min(20, int(2.0 / once)))
        both, alone = self._capture(run, calls), self._capture(None, calls)
        replays = max(5, min(30, int(budget_ms / (calls * once))))
        pairs = [(self._replay_ms(both), self._replay_ms(alone)) for _ in range(replays)]
        with_call, without = (median(column) for column in zip(*pairs, strict=True))
        return (with_call - without) / calls

    def _capture(self, run: Callable[[], object] | None, calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                self._filler.amax()
                if run is not None:
                    run()
        graph.replay()
        return graph

    @staticmethod
    def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def measure_rates(time_ms: Timer) -> Rates:
    # A kernel reads and writes 1 GiB: a captured copy may not be one.
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / time_ms(lambda: torch.neg(source, out=target)) * 1e3
    a, b = bf16(8192, 8192), bf16(8192, 8192)
    return Rates(copied, 2 * 8192**3 / time_ms(lambda: a @ b) * 1e3)


class Bench:
    """Collects results as it prints them. `sweep`: other launch parameters too; `dry`: runs each call once, untimed."""

    def __init__(self, only: str, sweep: bool, dry: bool) -> None:
        self.only, self.sweep, self.dry = only, sweep, dry
        self.time_ms = Timer()
        self.rates = Rates(1.0, 1.0) if dry else measure_rates(self.time_ms)
        self.results: list[Result] = []

    def add(self, kernel: str, shape: str, run: Callable[[], object], moved: float, operations: float = 0.0) -> None:
        if self.only not in kernel:
            return
        try:
            if self.dry:
                run()
                return
            result = Result(kernel, shape, self.time_ms(run), self.rates.floor_ms(moved, operations))
        except (RuntimeError, triton.runtime.errors.TritonError) as error:
            print(f"{kernel:34} {shape:26} failed: {str(error).splitlines()[0][:120]}", flush=True)
            return
        self.results.append(result)
        print(
            f"{kernel:34} {shape:26} {result.ms:9.4f} ms  floor {result.floor_ms:9.4f}  {result.efficiency:5.2f}",
            flush=True,
        )
