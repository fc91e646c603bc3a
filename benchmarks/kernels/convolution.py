# ruff: noqa: B023 (each closure runs before the loop goes on)
"""Causal convolution: decode batches and prompts."""

from benchmarks.kernels.shapes import HK, HV, K, bf16, shape_of, state_of
from benchmarks.kernels.timing import Bench
from twinflow.kernels.causal_conv1d.triton import causal_conv1d


def convolution(bench: Bench) -> None:
    channels = (2 * HK + HV) * K
    w = bf16(channels, 4)
    for lens in ((1,) * 32, (1,) * 256, (1024,), (4096,), (16384,), (4096,) * 8):
        x = bf16(sum(lens), channels)
        state, rows, fresh, cu = state_of(lens, channels, 3)
        state = state.bfloat16()
        moved = 2 * x.nbytes + 2 * len(lens) * channels * 6
        run = lambda *shape: causal_conv1d(x, w, None, state, rows, fresh, cu, lens, True, None, *shape)  # noqa: E731
        bench.add("causal conv1d", shape_of(lens), run, moved)
        for tokens, block, warps in (
            (16, 512, 4),
            (64, 512, 4),
            (32, 256, 4),
            (32, 256, 2),
            (32, 1024, 4),
            (16, 256, 2),
        ):
            if bench.sweep and lens[0] > 1:
                name = f"causal conv1d {tokens} x {block}, warps {warps}"
                bench.add(name, shape_of(lens), lambda: run(tokens, block, warps), moved)
