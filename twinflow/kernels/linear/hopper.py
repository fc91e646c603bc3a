"""Projections of few tokens on Hopper, in Gluon (Triton's language for explicit placement): half types only.

What a walk over the weights loses is its ends: until the first piece arrives, and while the last ones are worked on, the
memory is idle. Here the first pieces of the weights, which nobody is about to write, are asked for before the kernel in front
has ended (programmatic dependent launch); only the tokens wait for it.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twinflow.kernels.linear.tiles import Tile

ROWS = 64  # of the weights that a program has: what four warps multiply at once


def project(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: Tile, *, gated: bool) -> None:
    """Writes `out` (T, rows), or (parts, T, rows) where the tile has several. Rows of x must start at multiples of 16 B."""
    tokens, inner = x.shape
    rows = out.shape[-1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    weights = TensorDescriptor(weight, list(weight.shape), [inner, 1], [ROWS, tile.inner], layout)
    columns = TensorDescriptor(x, [tokens, inner], [x.stride(0), 1], [tile.tokens, tile.inner], layout)
    _project[(-(-rows // ROWS), tile.parts)](
        weights,
        columns,
        out,
        tokens,
        rows,
        inner // tile.inner,
        ROWS=ROWS,
        TOKENS=tile.tokens,
        STEP=tile.inner,
        STAGES=tile.stages,
        GATED=gated,
        num_warps=4,
        launch_pdl=True,
    )


@gluon.jit(do_not_specialize=["tokens", "steps"])
def _project(
    weights,
    columns,
    out,
    tokens,
    rows,
    steps,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    IO: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    MATRICES: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = (MATRICES * ROWS + TOKENS) * STEP * 2
    dtype: gl.constexpr = weights.dtype
    row = gl.program_id(0) * ROWS
    part = gl.program_id(1)
    parts = gl.num_programs(1)
    first = part * steps // parts
    count = (part + 1) * steps // parts - first
    w_shared = gl.allocate_shared_memory(dtype, [STAGES * MATRICES, ROWS, STEP], weights.layout)
    x_shared = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, STEP], columns.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        mbarrier.expect(bars.index(i), BYTES, pred=i < count)
        for m in gl.static_range(MATRICES):
            tma.async_copy_global_to_shared(
                weights,
                [row + m * rows, (first + i) * STEP],
                bars.index(i),
                w_shared.index(i * MATRICES + m),
                pred=i < count,
            )
    gdc_wait()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            columns, [0, (first + i) * STEP], bars.index(i), x_shared.index(i), pred=i < count
        )
    total = gl.full([ROWS, TOKENS], 0.0, gl.float32, SUM)
    up = gl.full([ROWS, TOKENS], 0.0, gl.float32, SUM)
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(bars.index(stage), i // STAGES % 2)
        x_part = x_shared.index(stage).permute((1, 0))
        total = warpgroup_mma(w_shared.index(stage * MATRICES), x_part, total, is_async=True)
        if GATED:
            up = warpgroup_mma(w_shared.index(stage * MATRICES + 1), x_part, up, is_async=True)
            total, up = warpgroup_mma_wait(2, [total, up])
        else:
            total = warpgroup_mma_wait(1, [total])
        # The products of the step before are done: what they read makes room for the piece after the last one on its way.
        gl.thread_barrier()
        more = (i > 0) & (i - 1 + STAGES < count)
        free = (i + STAGES - 1) % STAGES
        at = (first + i - 1 + STAGES) * STEP
        mbarrier.expect(bars.index(free), BYTES, pred=more)
        for m in gl.static_range(MATRICES):
            tma.async_copy_global_to_shared(
                weights, [row + m * rows, at], bars.index(free), w_shared.index(free * MATRICES + m), pred=more
            )
        tma.async_copy_global_to_shared(columns, [0, at], bars.index(free), x_shared.index(free), pred=more)
    total, up = warpgroup_mma_wait(0, [total, up])
    if GATED:
        total = total / (1.0 + gl.exp(-total)) * up
    y = gl.convert_layout(total.to(out.dtype.element_ty), IO)
    o = row + gl.arange(0, ROWS, gl.SliceLayout(1, IO))
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, IO))
    place = (part * tokens + t).to(gl.int64) * rows
    gl.store(out + place[None, :] + o[:, None], y, mask=(o < rows)[:, None] & (t < tokens)[None, :])
