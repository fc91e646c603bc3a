# ruff: noqa: B023 (each closure runs before the loop goes on)
"""Times the Triton kernels at the shapes of a 4B hybrid (24 Gated DeltaNet and 8 attention layers) and of a 30B Mamba-2
hybrid, beside the least time the card could take. One layer each, bf16, temporal states fp32, caches strided as in the
arena.

    python3 -m benchmarks.kernels [--sweep] [--only NAME] [--json FILE]

Floor = the larger of bytes over the measured copy rate and operations over the measured matrix rate.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import triton

from twinflow.kernels.attention_inputs.triton import attention_inputs
from twinflow.kernels.base import HeadNorm
from twinflow.kernels.causal_conv1d.triton import causal_conv1d
from twinflow.kernels.chunk_scan.triton import scan_chunks
from twinflow.kernels.gated_delta_rule.prepare import prepare_chunks
from twinflow.kernels.gated_delta_rule.triton import gated_delta, one_token
from twinflow.kernels.gated_group_norm.triton import gated_group_norm
from twinflow.kernels.gating.triton import sigmoid_gate, swiglu
from twinflow.kernels.mamba2_ssd.triton import mamba2_ssd
from twinflow.kernels.norms.triton import add_rms_norm, gated_rms_norm
from twinflow.kernels.paged_attention.decode import attend_one_query
from twinflow.kernels.paged_attention.prefill import attend_many_queries

HIDDEN, FFN = 2560, 9216
HEADS, KV_HEADS, DIM, ROTARY, BLOCK = 16, 4, 256, 64, 64
HK, HV, K = 16, 32, 128  # Gated DeltaNet; V = K
MH, MP, MN, MG = 64, 64, 128, 8  # Mamba-2: heads, head dim, state dim, groups


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


def time_ms(run: Callable[[], object]) -> float:
    """Median of replays of a CUDA graph of `run`, the L2 cache overwritten in between."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(triton.testing.do_bench(graph.replay, warmup=5, rep=40, return_mode="median"))


def measure_rates() -> Rates:
    source = torch.randn(
        1 << 28, device="cuda"
    )  # 1 GiB; a kernel reads and writes it, since a captured copy may not be one
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / time_ms(lambda: torch.neg(source, out=target)) * 1e3
    a, b = bf16(8192, 8192), bf16(8192, 8192)
    return Rates(copied, 2 * 8192**3 / time_ms(lambda: a @ b) * 1e3)


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def lens_on_device(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lens], device="cuda").cumsum(0).to(torch.int32)


def state_of(lens: tuple[int, ...], *shape: int) -> tuple[torch.Tensor, ...]:
    """A pool with a gap between rows, its rows in a scattered order, fresh flags and prefix sums."""
    pool = torch.randn(len(lens) + 1, 2, *shape, device="cuda")[:, 1]
    rows = torch.randperm(len(lens), device="cuda") + 1
    return pool, rows, torch.zeros(len(lens), dtype=torch.bool, device="cuda"), lens_on_device(lens)


def delta_case(lens: tuple[int, ...]) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    tokens = sum(lens)
    q, k, v = bf16(tokens, (2 * HK + HV) * K).split([HK * K, HK * K, HV * K], 1)
    a, b = bf16(tokens, 2 * HV).split(HV, 1)
    heads = [torch.rand(HV, device="cuda").mul(15).add(1).log(), torch.empty(HV, device="cuda").uniform_(-4, 1)]
    return [q.unflatten(1, (HK, K)), k.unflatten(1, (HK, K)), v.unflatten(1, (HV, K)), a, b, *heads], state_of(
        lens, HV, K, K
    )


def caches(blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer in blocks of several, as in the arena."""
    both = torch.empty(blocks, 4, 2, KV_HEADS, BLOCK, DIM, dtype=torch.bfloat16, device="cuda").normal_()[:, 1]
    return both[:, 0], both[:, 1]


def attention_case(contexts: list[int], queries: int) -> tuple[torch.Tensor, ...]:
    width = max(contexts) // BLOCK
    k, v = caches(len(contexts) * width)
    tables = torch.randperm(len(contexts) * width, device="cuda").view(len(contexts), width).to(torch.int32)
    q = bf16(len(contexts) * queries, HEADS, DIM)
    lens = lens_on_device((queries,) * len(contexts))
    return q, k, v, tables, torch.tensor(contexts, dtype=torch.int32, device="cuda"), lens


class Bench:
    """Collects results as it prints them. `sweep`: other launch parameters too."""

    def __init__(self, rates: Rates, only: str, sweep: bool, dry: bool) -> None:
        self.rates, self.only, self.sweep, self.dry = rates, only, sweep, dry
        self.results: list[Result] = []

    def add(self, kernel: str, shape: str, run: Callable[[], object], moved: float, operations: float = 0.0) -> None:
        if self.only not in kernel:
            return
        try:
            if self.dry:
                run()
                return
            result = Result(kernel, shape, time_ms(run), self.rates.floor_ms(moved, operations))
        except (RuntimeError, triton.runtime.errors.TritonError) as error:
            print(f"{kernel:34} {shape:26} failed: {str(error).splitlines()[0][:120]}", flush=True)
            return
        self.results.append(result)
        print(
            f"{kernel:34} {shape:26} {result.ms:9.4f} ms  floor {result.floor_ms:9.4f}  {result.efficiency:5.2f}",
            flush=True,
        )

    def elementwise(self) -> None:
        for tokens in (256, 16384):
            x, y, w, shape = bf16(tokens, HIDDEN), bf16(tokens, HIDDEN), bf16(HIDDEN), f"T={tokens}"
            self.add("add + rms norm", shape, lambda: add_rms_norm(x, y, w, 1e-6, True), 4 * x.nbytes)
            o, z, wv = bf16(tokens, HV, K), bf16(tokens, HV, K), bf16(K)
            self.add("gated rms norm", shape, lambda: gated_rms_norm(o, z, wv, 1e-6), 3 * o.nbytes)
            up = bf16(tokens, 2 * FFN)
            self.add("swiglu", shape, lambda: swiglu(up), 1.5 * up.nbytes)
            m, mz, mw = bf16(tokens, MH * MP), bf16(tokens, MH * MP), bf16(MH * MP)
            self.add("gated group norm", shape, lambda: gated_group_norm(m, mz, mw, MG, 1e-5), 3 * m.nbytes)
            qkv = bf16(tokens, (2 * HEADS + 2 * KV_HEADS) * DIM)
            q, gate, k, v = qkv.split([HEADS * DIM, HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1)
            self.add("sigmoid gate", shape, lambda: sigmoid_gate(o.flatten(1), gate), 3 * o.nbytes)
            q, k, v = q.unflatten(1, (HEADS, DIM)), k.unflatten(1, (KV_HEADS, DIM)), v.unflatten(1, (KV_HEADS, DIM))
            norm = HeadNorm(bf16(DIM), 1e-6, True)
            angles = torch.randn(2, tokens, ROTARY // 2, device="cuda").unbind(0)
            store, slots = caches(tokens // BLOCK), torch.randperm(tokens, device="cuda")
            moved = 2 * 2 * tokens * (HEADS + 2 * KV_HEADS) * DIM
            self.add(
                "norm + rotary + KV write",
                shape,
                lambda: attention_inputs(q, k, v, norm, norm, *angles, *store, slots),
                moved,
            )

    def convolution(self) -> None:
        channels = (2 * HK + HV) * K
        w = bf16(channels, 4)
        for lens in ((1,) * 32, (1,) * 256, (1024,), (4096,), (16384,), (4096,) * 8):
            x = bf16(sum(lens), channels)
            state, rows, fresh, cu = state_of(lens, channels, 3)
            state = state.bfloat16()
            moved = 2 * x.nbytes + 2 * len(lens) * channels * 6
            self.add(
                "causal conv1d",
                shape_of(lens),
                lambda: causal_conv1d(x, w, None, state, rows, fresh, cu, lens),
                moved,
            )

    def delta_decode(self) -> None:
        for batch in (1, 8, 32, 128, 256):
            lens = (1,) * batch
            x, where = delta_case(lens)
            moved = batch * (8 * HV * K * K + 2 * (2 * HK + 2 * HV) * K)
            self.add("gated delta, one token", f"B={batch}", lambda: gated_delta(*x, *where, lens), moved)
            for tile, warps in ((8, 1), (16, 2), (16, 4), (32, 8), (64, 4), (64, 8)) if self.sweep else ():
                out = torch.empty_like(x[2])
                self.add(
                    f"gated delta one tile {tile} warps {warps}",
                    f"B={batch}",
                    lambda: one_token(*x, out, *where, 1e-6, all_one=True, value_tile=tile, warps=warps),
                    moved,
                )

    def delta_prefill(self) -> None:
        for lens in ((256,), (1024,), (4096,), (16384,), (4096,) * 8):
            x, where = delta_case(lens)
            tokens = sum(lens)
            moved = 2 * tokens * (2 * HK + 2 * HV) * K + 8 * len(lens) * HV * K * K
            # Per chunk of 64 and head: K K^T, Q K^T, U, W, M X (64 x 64 x K), W S, Q S, X^T K (64 x K x K).
            operations = 2 * tokens * HV * (5 * 64 * K + 3 * K * K)
            shape = shape_of(lens)
            for widen in (True, False):
                name = "gated delta, chunks" + ", widened" * widen
                run = lambda: gated_delta(*x, *where, lens, widen_chunks=widen)  # noqa: E731
                self.add(name, shape, run, moved, operations)
            prepare = lambda warps=4: prepare_chunks(*x, where[3], len(lens), 1e-6, warps)  # noqa: E731
            for warps in (4, 8):
                self.add(f"  its preparation, warps {warps}", shape, lambda: prepare(warps), moved, operations)
            chunks, out = prepare(), torch.empty_like(x[2])
            for tile, warps, stages in (
                (32, 4, 1),
                (32, 4, 2),
                (32, 4, 3),
                (16, 4, 2),
                (64, 4, 2),
                (64, 8, 2),
                (32, 8, 2),
            ):
                if self.sweep or (warps, stages) == (4, 2):
                    self.add(
                        f"  its scan, tile {tile} warps {warps} x{stages}",
                        shape,
                        lambda: scan_chunks(x[0], x[1], chunks, None, out, *where, tile, warps, stages),
                        moved,
                        operations,
                    )

    def mamba(self) -> None:
        for lens in ((1,) * 32, (1,) * 256, (4096,), (16384,)):
            tokens = sum(lens)
            x, b, c = bf16(tokens, MH * MP + 2 * MG * MN).split([MH * MP, MG * MN, MG * MN], 1)
            x, b, c = x.unflatten(1, (MH, MP)), b.unflatten(1, (MG, MN)), c.unflatten(1, (MG, MN))
            heads = [
                torch.rand(MH, device="cuda").add(1).log(),
                torch.randn(MH, device="cuda"),
                torch.randn(MH, device="cuda"),
            ]
            where, dt = state_of(lens, MH, MP, MN), bf16(tokens, MH)
            moved = 2 * tokens * (2 * MH * MP + 2 * MG * MN) + 8 * len(lens) * MH * MP * MN
            operations = 0 if lens[0] == 1 else 2 * tokens * MH * (64 * (MN + MP) + 2 * MP * MN)
            self.add(
                "mamba-2 ssd", shape_of(lens), lambda: mamba2_ssd(x, b, c, dt, *heads, *where, lens), moved, operations
            )

    def attention_decode(self) -> None:
        for batch, context in ((1, 1024), (32, 1024), (256, 1024), (32, 8192), (8, 32768)):
            case = attention_case([context] * batch, 1)
            out, shape = torch.empty_like(case[0]), f"B={batch} ctx={context}"
            moved = 4 * batch * context * KV_HEADS * DIM
            for tile, warps, stages in (
                (64, 4, 2),
                (32, 4, 2),
                (32, 4, 3),
                (32, 4, 4),
                (64, 4, 3),
                (64, 8, 2),
                (32, 2, 3),
            ):
                if self.sweep or (tile, warps, stages) == (64, 4, 2):
                    options = {"tile": tile, "warps": warps, "stages": stages}
                    self.add(
                        f"attention, one query {tile}/{warps}/x{stages}",
                        shape,
                        lambda: attend_one_query(*case, DIM**-0.5, out, all_one=True, **options),
                        moved,
                    )
            for splits in (2, 4, 8, 16, 32, 64) if self.sweep else ():
                self.add(
                    f"attention, one query, {splits} splits",
                    shape,
                    lambda: attend_one_query(*case, DIM**-0.5, out, all_one=True, splits=splits),
                    moved,
                )

    def attention_prefill(self) -> None:
        for context, queries in ((1024, 1024), (4096, 4096), (16384, 16384), (16384, 1024)):
            case = attention_case([context], queries)
            out, shape = torch.empty_like(case[0]), f"T={queries} ctx={context}"
            pairs = queries * (context - queries) + queries * (queries + 1) / 2
            moved = 2 * 2 * (queries * HEADS + context * KV_HEADS) * DIM
            variants = (
                (128, 64, 8, 2),
                (128, 64, 8, 1),
                (128, 64, 8, 3),
                (128, 32, 8, 3),
                (64, 64, 4, 2),
                (128, 32, 4, 3),
            )
            for rows, tile, warps, stages in variants if self.sweep else variants[:1]:
                options = {"rows": rows, "tile": tile, "warps": warps, "stages": stages}
                self.add(
                    f"attention, prefill {rows}/{tile}/{warps}/x{stages}",
                    shape,
                    lambda: attend_many_queries(*case, DIM**-0.5, out, **options),
                    moved,
                    4 * pairs * HEADS * DIM,
                )


def shape_of(lens: tuple[int, ...]) -> str:
    if lens[0] == 1:
        return f"B={len(lens)}"
    return f"T={lens[0]}" if len(lens) == 1 else f"T={len(lens)} x {lens[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other launch parameters too")
    parser.add_argument("--dry", action="store_true", help="run each kernel once, untimed (compiles them)")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--part", default="", help="one part: elementwise, convolution, delta_decode, ...")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    rates = Rates(1.0, 1.0) if options.dry else measure_rates()
    card = torch.cuda.get_device_name()
    if not options.dry:
        print(f"{card}: copy {rates.bytes_per_s / 1e12:.2f} TB/s, matrix {rates.operations_per_s / 1e12:.0f} TFLOP/s")
    bench = Bench(rates, options.only, options.sweep, options.dry)
    parts = (
        bench.delta_decode,
        bench.delta_prefill,
        bench.attention_prefill,
        bench.attention_decode,
        bench.convolution,
        bench.elementwise,
        bench.mamba,
    )
    for part in parts:
        if options.part in part.__name__:
            torch.manual_seed(0)
            part()
            torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            rows = [asdict(r) | {"efficiency": r.efficiency} for r in bench.results]
            json.dump({"card": card, "rates": asdict(rates), "results": rows}, file, indent=1)


if __name__ == "__main__":
    main()
