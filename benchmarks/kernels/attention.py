# ruff: noqa: B023 (each closure runs before the loop goes on)
"""Paged attention: decode, decode with shared prefixes, prefill."""

import torch

from benchmarks.kernels.shapes import BLOCK, DIM, HEADS, KV_HEADS, bf16, caches, lens_on_device
from benchmarks.kernels.timing import Bench
from twinflow.kernels.paged_attention.decode import attend_one_query
from twinflow.kernels.paged_attention.prefill import LaunchOptions, attend_many_queries
from twinflow.kernels.paged_attention.shared import group_prefixes

DECODE_VARIANTS = (
    (64, 4, 3, 1),
    (64, 8, 3, 1),
    (64, 4, 2, 2),
    (32, 4, 3, 2),
    (32, 4, 4, 2),
)  # tile, warps, stages, each
PREFILL_VARIANTS = (
    LaunchOptions(128, 64, 8, 2, 1),
    LaunchOptions(128, 32, 8, 3, 1),
    LaunchOptions(64, 32, 4, 3, 1),
    LaunchOptions(64, 32, 4, 3, 2),
    LaunchOptions(64, 32, 4, 3, 8),
)


def attention_case(contexts: list[int], queries: int, width: int | None = None) -> tuple[torch.Tensor, ...]:
    blocks = -(-max(contexts) // BLOCK)
    k, v = caches(len(contexts) * blocks)
    tables = torch.full((len(contexts), width or blocks), -1, dtype=torch.int32, device="cuda")
    tables[:, :blocks] = torch.randperm(len(contexts) * blocks, device="cuda").view(len(contexts), blocks)
    q = bf16(len(contexts) * queries, HEADS, DIM)
    lens = lens_on_device((queries,) * len(contexts))
    return q, k, v, tables, torch.tensor(contexts, dtype=torch.int32, device="cuda"), lens


def attention_decode(bench: Bench) -> None:
    shapes = (
        (1, 1024, None),
        (32, 1024, None),
        (32, 1024, 4096),
        (256, 1024, None),
        (32, 8192, None),
        (8, 32768, None),
    )
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    for batch, context, width in shapes:
        case = attention_case([context] * batch, 1, width)
        out, gate = torch.empty_like(case[0]), bf16(batch, HEADS * DIM)
        shape = f"B={batch} ctx={context}" + f" of {width * BLOCK}" * (width is not None)
        moved = 4 * batch * context * KV_HEADS * DIM
        run = lambda **options: attend_one_query(*case, DIM**-0.5, out, all_one=True, gate=gate, **options)  # noqa: E731
        bench.add("attention, one query", shape, run, moved)
        for tile, warps, stages, each in DECODE_VARIANTS if bench.sweep else ():
            options = {"tile": tile, "warps": warps, "stages": stages, "programs": each * processors}
            bench.add(f"  {tile}/{warps}/x{stages}/{each}", shape, lambda: run(**options), moved)
        for name in ("described", "early") if bench.sweep else ():
            bench.add(f"  not {name}", shape, lambda: run(**{name: False}), moved)


def attention_shared(bench: Bench) -> None:
    batch, groups, prefix, own = 256, 2, 16384, 1100
    n, m = prefix // BLOCK, -(-own // BLOCK)
    k, v = caches(groups * n + batch * m)
    tables = torch.empty(batch, n + m, dtype=torch.int32)
    tables[:, :n] = torch.arange(groups * n, dtype=torch.int32).view(groups, n).repeat(batch // groups, 1)
    tables[:, n:] = groups * n + torch.arange(batch * m, dtype=torch.int32).view(batch, m)
    contexts = torch.full((batch,), prefix + own, dtype=torch.int32)
    shared = group_prefixes(tables.numpy(), contexts.numpy(), BLOCK)
    assert shared is not None
    shared = shared.to("cuda")
    q, gate = bf16(batch, HEADS, DIM), bf16(batch, HEADS * DIM)
    case = (q, k, v, tables.cuda(), contexts.cuda(), lens_on_device((1,) * batch), DIM**-0.5, torch.empty_like(q))
    pairs = batch * prefix * HEADS
    alone = 4 * batch * (prefix + own) * KV_HEADS * DIM
    once = 4 * (groups * prefix + batch * own) * KV_HEADS * DIM
    shape = f"B={batch}: {groups} x {prefix} + {own}"
    bench.add("attention, nothing shared", shape, lambda: attend_one_query(*case, all_one=True, gate=gate), alone)
    run = lambda: attend_one_query(*case, all_one=True, gate=gate, shared=shared)  # noqa: E731
    bench.add("attention, shared prefixes", shape, run, once, 4 * pairs * DIM)


def attention_prefill(bench: Bench) -> None:
    for context, queries in (
        (512, 512),
        (1024, 1024),
        (4096, 4096),
        (16384, 16384),
        (8192, 64),
        (16384, 1024),
        (16384, 8192),
    ):
        case = attention_case([context], queries)
        out, shape = torch.empty_like(case[0]), f"T={queries} ctx={context}"
        operations = 4 * (queries * (context - queries) + queries * (queries + 1) / 2) * HEADS * DIM
        moved = 2 * 2 * (queries * HEADS + context * KV_HEADS) * DIM
        run = lambda **options: attend_many_queries(*case, DIM**-0.5, out, lens=(queries,), **options)  # noqa: E731
        bench.add("attention, prefill", shape, run, moved, operations)
        for o in PREFILL_VARIANTS if bench.sweep else ():
            name = f"  {o.rows}/{o.tile}/{o.warps}/x{o.stages}, {o.splits} splits"
            bench.add(name, shape, lambda: run(options=o), moved, operations)
