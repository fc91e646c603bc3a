# ruff: noqa: B023 (each closure runs before the loop goes on)
"""Gated delta rule: one-token updates and chunks, with their parts alone."""

import torch

from benchmarks.kernels.shapes import HK, HV, K, bf16, shape_of, state_of
from benchmarks.kernels.timing import Bench
from twinflow.kernels.chunk_scan.triton import scan_chunks
from twinflow.kernels.gated_delta_rule.prepare import prepare_chunks
from twinflow.kernels.gated_delta_rule.recurrent import run_tokens
from twinflow.kernels.gated_delta_rule.triton import gated_delta


def delta_case(lens: tuple[int, ...]) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    tokens = sum(lens)
    q, k, v = bf16(tokens, (2 * HK + HV) * K).split([HK * K, HK * K, HV * K], 1)
    a, b = bf16(tokens, 2 * HV).split(HV, 1)
    heads = [torch.rand(HV, device="cuda").mul(15).add(1).log(), torch.empty(HV, device="cuda").uniform_(-4, 1)]
    return [q.unflatten(1, (HK, K)), k.unflatten(1, (HK, K)), v.unflatten(1, (HV, K)), a, b, *heads], state_of(
        lens, HV, K, K
    )


def delta_decode(bench: Bench) -> None:
    for batch in (1, 8, 32, 128, 256):
        lens = (1,) * batch
        x, where = delta_case(lens)
        moved = batch * (8 * HV * K * K + 2 * (2 * HK + 2 * HV) * K)
        bench.add("gated delta, one token", f"B={batch}", lambda: gated_delta(*x, *where, lens), moved)
        for tile, warps in ((8, 1), (16, 2), (16, 4), (32, 8), (64, 4), (64, 8)) if bench.sweep else ():
            out = torch.empty_like(x[2])
            bench.add(
                f"gated delta one tile {tile} warps {warps}",
                f"B={batch}",
                lambda: run_tokens(*x, out, *where, 1e-6, only_single=True, value_tile=tile, warps=warps),
                moved,
            )


def delta_prefill(bench: Bench) -> None:
    for lens in ((256,), (1024,), (4096,), (16384,), (4096,) * 32):
        x, where = delta_case(lens)
        tokens = sum(lens)
        moved = 2 * tokens * (2 * HK + 2 * HV) * K + 8 * len(lens) * HV * K * K
        # Per chunk of 64 and head: K K^T, Q K^T, U, W, M X (64 x 64 x K), W S, Q S, X^T K (64 x K x K).
        operations = 2 * tokens * HV * (5 * 64 * K + 3 * K * K)
        shape = shape_of(lens)
        bench.add("gated delta, chunks", shape, lambda: gated_delta(*x, *where, lens), moved, operations)
        q, k, v, *gates = x
        prepare = lambda registers=128: prepare_chunks(q, k, *gates, where[3], len(lens), 1e-6, registers=registers)  # noqa: E731
        for registers in (128, 168, None) if bench.sweep else (128,):
            name = f"  its preparation, {registers} registers"
            bench.add(name, shape, lambda: prepare(registers), moved, operations)
        chunks, out = prepare(), torch.empty_like(v)
        variants = ((64, 4, 3), (64, 4, 2), (64, 4, 1), (128, 8, 3), (128, 8, 2), (32, 4, 3), (32, 4, 2), (32, 2, 3))
        for tile, warps, stages in variants if bench.sweep else variants[:1]:
            bench.add(
                f"  its scan, tile {tile} warps {warps} x{stages}",
                shape,
                lambda: scan_chunks(q, k, v, chunks, None, out, *where, tile, warps, stages),
                moved,
                operations,
            )
