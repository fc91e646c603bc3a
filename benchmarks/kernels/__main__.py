"""Times the Triton kernels at the shapes of `shapes.py`, beside the least time the card could take. One layer each, bf16,
temporal states fp32, caches strided as in the arena.

    python3 -m benchmarks.kernels [--sweep] [--part NAME] [--only NAME] [--json FILE]

Floor = the larger of bytes over the measured copy rate and operations over the measured matrix rate.
"""

import argparse
import json
from dataclasses import asdict

import torch

from benchmarks.kernels.attention import attention_decode, attention_prefill, attention_shared
from benchmarks.kernels.convolution import convolution
from benchmarks.kernels.delta import delta_decode, delta_prefill
from benchmarks.kernels.elementwise import elementwise
from benchmarks.kernels.kept import kept_states
from benchmarks.kernels.linear import linear_decode, linear_gated
from benchmarks.kernels.mamba import mamba
from benchmarks.kernels.sampling import sampling
from benchmarks.kernels.timing import Bench

PARTS = (
    delta_decode,
    delta_prefill,
    kept_states,
    attention_prefill,
    attention_decode,
    attention_shared,
    convolution,
    elementwise,
    linear_decode,
    linear_gated,
    mamba,
    sampling,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other launch parameters too")
    parser.add_argument("--dry", action="store_true", help="run each kernel once, untimed (compiles them)")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument(
        "--part", default="", help="parts whose name contains this: " + ", ".join(p.__name__ for p in PARTS)
    )
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    bench = Bench(options.only, options.sweep, options.dry)
    card, rates = torch.cuda.get_device_name(), bench.rates
    print(f"{card}: copy {rates.bytes_per_s / 1e12:.2f} TB/s, matrix {rates.operations_per_s / 1e12:.0f} TFLOP/s")
    for part in PARTS:
        if options.part in part.__name__:
            torch.manual_seed(0)
            part(bench)
            torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            rows = [asdict(r) | {"efficiency": r.efficiency} for r in bench.results]
            json.dump({"card": card, "rates": asdict(rates), "results": rows}, file, indent=1)


if __name__ == "__main__":
    main()
