# ruff: noqa: B023 (each closure runs before the loop goes on)
"""Gated delta rule: one-token updates and chunks, with their parts alone."""

from functools import partial

import torch

from benchmarks.kernels.shapes import HK, HV, K, bf16, shape_of, state_of
from benchmarks.kernels.timing import Bench
from twinflow.kernels.chunk_scan.triton import scan_chunks
from twinflow.kernels.gated_delta_rule.decode import gated_delta_decode
from twinflow.kernels.gated_delta_rule.prepare import prepare_chunks
from twinflow.kernels.gated_delta_rule.triton import gated_delta
from twinflow.kernels.triton_tools import runs_gluon


def delta_case(lens: tuple[int, ...]) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    tokens = sum(lens)
    q, k, v = bf16(tokens, (2 * HK + HV) * K).split([HK * K, HK * K, HV * K], 1)
    a, b = bf16(tokens, 2 * HV).split(HV, 1)
    heads = [torch.rand(HV, device="cuda").mul(15).add(1).log(), torch.empty(HV, device="cuda").uniform_(-4, 1)]
    return [q.unflatten(1, (HK, K)), k.unflatten(1, (HK, K)), v.unflatten(1, (HV, K)), a, b, *heads], state_of(
        lens, HV, K, K
    )


def delta_decode(bench: Bench) -> None:
    """A layer between its projections for one token of each sequence; and its update alone."""
    channels = (2 * HK + HV) * K
    for batch in (1, 8, 32, 64, 128, 256):
        lens = (1,) * batch
        x, (state, rows, fresh, cu) = delta_case(lens)
        mixed, z, a, b = bf16(batch, channels + HV * K + 2 * HV).split([channels, HV * K, HV, HV], 1)
        conv, conv_state, norm = bf16(channels, 4), state_of(lens, channels, 3)[0].bfloat16(), bf16(K)
        states = batch * (8 * HV * K * K + 2 * 2 * 3 * channels)
        moved = states + 2 * batch * (channels + 2 * HV * K) + conv.nbytes
        projected = (mixed, z, a, b, conv, conv_state, *x[5:], state, norm, rows, fresh, 1e-6)
        layer = partial(gated_delta_decode, *projected)
        bench.add("gated delta layer, one token", f"B={batch}", layer, moved)
        for warps, registers in ((4, None), (8, 96), (8, 80), (16, 64)) if bench.sweep else ():
            name = f"gated delta layer, {warps} warps, {registers} registers"
            bench.add(name, f"B={batch}", partial(layer, warps=warps, registers=registers), moved)
        moved = batch * (8 * HV * K * K + 2 * (2 * HK + 2 * HV) * K)
        bench.add("gated delta, one token", f"B={batch}", lambda: gated_delta(*x, state, rows, fresh, cu, lens), moved)


def delta_prefill(bench: Bench) -> None:
    for lens in ((256,), (1024,), (4096,), (16384,), (4096,) * 32):
        x, where = delta_case(lens)
        tokens = sum(lens)
        moved = 2 * tokens * (2 * HK + 2 * HV) * K + 8 * len(lens) * HV * K * K
        # Per chunk of 64 and head: K K^T, Q K^T, T V, T Y, M X (64 x 64 x K), S K, S Q, X^T K (64 x K x K).
        operations = 2 * tokens * HV * (5 * 64 * K + 3 * K * K)
        shape = shape_of(lens)
        bench.add("gated delta, chunks", shape, lambda: gated_delta(*x, *where, lens), moved, operations)
        q, k, v, *gates = x
        prepare = lambda *shape: prepare_chunks(q, k, *gates, where[3], len(lens), 1e-6, *shape)  # noqa: E731
        bench.add("  its preparation", shape, prepare, moved, operations)
        programs = ((1, 4, 128), (2, 4, 128), (2, 4, 168), (2, 4, None), (1, 4, 168)) if bench.sweep else ()
        for shape_of_program in programs:
            name = "  its preparation {} heads, {} warps, {} registers".format(*shape_of_program)
            bench.add(name, shape, lambda: prepare(*shape_of_program), moved, operations)
        chunks, out = prepare(), torch.empty_like(v)
        for parts in (1, 2) if runs_gluon(q.device) else ():
            from twinflow.kernels.chunk_scan.hopper import scan_corrected_chunks

            left_running = partial(scan_corrected_chunks, q, k, v, chunks, out, *where, parts=parts)
            bench.add(f"  its scan left running, {parts} parts", shape, left_running, moved, operations)
        variants = ((64, 4, 3), (64, 4, 2), (64, 4, 1), (128, 8, 3), (128, 8, 2), (32, 4, 3), (32, 4, 2), (32, 2, 3))
        for tile, warps, stages in variants if bench.sweep else variants[:1]:
            bench.add(
                f"  its scan, tile {tile} warps {warps} x{stages}",
                shape,
                lambda: scan_chunks(q, k, v, chunks, None, out, *where, None, tile, warps, stages),
                moved,
                operations,
            )
