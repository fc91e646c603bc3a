"""What a launch of the sampler costs the host: 256 rows, a vocabulary of 151,936, by option.

    python3 -m benchmarks.sampling_host [--rows N]

Prints microseconds of `launch` (the stream is idle before each), of `read` and, per row, of `start`.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from benchmarks.kernels.sampling import OPTIONS, VOCAB
from twinflow.contracts.requests import SamplingParams
from twinflow.engine.sampling import Sampler
from twinflow.kernels.select import select_kernels


def microseconds(run: Callable[[int], object], repeats: int = 40) -> float:
    """Median over calls with their number; the first three do not count."""
    times = []
    for i in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(i)
        times.append(1e6 * (time.perf_counter() - start))
    return median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    logits = torch.randn(parser.parse_args().rows, VOCAB, device="cuda", dtype=torch.bfloat16)
    print(torch.cuda.get_device_name())
    for name, params in {**OPTIONS, "greedy, log-probabilities": replace(OPTIONS["greedy"], logprobs=5)}.items():
        time_option(name, params, logits)


def time_option(name: str, params: SamplingParams, logits: torch.Tensor) -> None:
    rows = list(range(len(logits)))
    sampler = Sampler(VOCAB, len(rows), "cuda", select_kernels("cuda"))
    prompt = bytes(4 * 1000)
    begun = time.perf_counter()
    for row in rows:
        sampler.start(row, replace(params, seed=row), prompt, [])
    started = 1e6 * (time.perf_counter() - begun) / len(rows)
    launched = microseconds(lambda i: sampler.launch(logits, rows, [i] * len(rows)))
    draw = sampler.launch(logits, rows, [0] * len(rows))
    read = microseconds(lambda _: draw.read())
    print(f"{name:28} launch {launched:6.0f} us  read {read:6.0f}  start {started:5.0f}")


if __name__ == "__main__":
    main()
