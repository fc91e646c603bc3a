# ruff: noqa: B023 (each closure runs before the loop goes on)
"""Projections of few tokens, beside the library's products, and all of one decode step together. Gate and up of many."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.kernels.shapes import DIM, FFN, HEADS, HIDDEN, HK, HV, KV_HEADS, K, bf16
from benchmarks.kernels.timing import Bench
from twinflow.kernels.gating.triton import swiglu
from twinflow.kernels.linear.hopper import MIN_TOKENS, can_run, project_gated
from twinflow.kernels.linear.triton import linear, linear_residual, linear_swiglu

VOCAB = 151_936
TOKENS = (1, 2, 8, 16, 32, 48, 64, 128, 256)
SHAPES = {  # (out, in)
    "qkvzba": ((2 * HK + 2 * HV) * K + 2 * HV, HIDDEN),
    "qkv": ((2 * HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "out": (HIDDEN, HEADS * DIM),
    "gate, up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "head": (VOCAB, HIDDEN),
}
REST = ("out", "gate, up", "down")
STEP = 8 * (3 * ("qkvzba", *REST) + ("qkv", *REST)) + ("head",)  # 24 Gated DeltaNet and 8 attention layers

MANY = (512, 1024, 2048, 4096, 16384)


def onto(x: torch.Tensor, weight: torch.Tensor) -> object:
    return linear_residual(x, weight, x.new_empty(x.shape[0], weight.shape[0]))


OWN: dict[str, Callable[..., object]] = {"out": onto, "down": onto, "gate, up": linear_swiglu}


def linear_decode(bench: Bench) -> None:
    weights = {name: bf16(*shape) for name, shape in SHAPES.items()}
    parameters = sum(weights[name].numel() for name in STEP)
    for tokens in TOKENS:
        inputs = {inner: bf16(tokens, inner) for _, inner in SHAPES.values()}
        for name, weight in weights.items():
            x, own, moved, operations = inputs[weight.shape[1]], OWN.get(name, linear), weight.nbytes, weight.numel()
            bench.add(f"projection {name}", f"T={tokens}", lambda: own(x, weight), moved, 2 * tokens * operations)
            bench.add(f"library {name}", f"T={tokens}", lambda: F.linear(x, weight), moved, 2 * tokens * operations)

        def run(how: Callable[[str], Callable[..., object]]) -> None:
            # Between two uses of a weight lie the others of a layer, more than any cache holds.
            for name in STEP:
                how(name)(inputs[SHAPES[name][1]], weights[name])

        for who, how in (("projections", lambda name: OWN.get(name, linear)), ("library", lambda name: F.linear)):
            bench.add(f"{who} of a step", f"T={tokens}", lambda: run(how), 2 * parameters, 2 * tokens * parameters)


def linear_gated(bench: Bench) -> None:
    weight = bf16(2 * FFN, HIDDEN)
    for tokens in MANY:
        x, shape = bf16(tokens, HIDDEN), f"T={tokens}"
        work = weight.nbytes + x.nbytes + 2 * tokens * FFN, 2 * tokens * weight.numel()
        bench.add("gated projection", shape, lambda: linear_swiglu(x, weight), *work)
        bench.add("library gate, up and SwiGLU", shape, lambda: swiglu(F.linear(x, weight)), *work)
        if bench.sweep and tokens < MIN_TOKENS and can_run(x, weight):
            bench.add("gated projection in one kernel", shape, lambda: project_gated(x, weight), *work)
