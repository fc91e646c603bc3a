"""The device side of `hopper.py`, in Gluon.

A stage of the ring is STEP columns of the tokens of both warpgroups, and of COLUMNS gate and as many up rows of the
weights. `full[stage]`: its bytes have arrived; `empty[stage]`: both warpgroups have multiplied it. A ring's phase flips each
time around.
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

from twinflow.kernels.linear import hopper

GROUPS = gl.constexpr(hopper.GROUPS)
TOKENS = gl.constexpr(hopper.TOKENS)
COLUMNS = gl.constexpr(hopper.COLUMNS)
STEP = gl.constexpr(hopper.STEP)
STAGES = gl.constexpr(hopper.STAGES)
LAG = gl.constexpr(hopper.LAG)
SIDE = gl.constexpr(hopper.SIDE)
MANY = gl.constexpr(hopper.MULTIPLIER_REGISTERS)
FEW = gl.constexpr(hopper.LOADER_REGISTERS)


def describe(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of a matrix, in boxes of rows x columns; what lies outside is read as 0 and not written."""
    element = gl.float16 if tensor.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], element)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)


@gluon.jit
def _place(tile, token_tiles, column_tiles):
    """Tile -> (of tokens, of columns): SIDE tiles of tokens side by side walk the columns together, as the L2 cache likes."""
    walk = SIDE * column_tiles
    first = tile // walk * SIDE
    side = min(token_tiles - first, SIDE)
    inside = tile % walk
    return first + inside % side, inside // side


@gluon.jit
def _load(x, weight, rows, pairs, full, empty, tokens, columns, inner):
    token_tiles, column_tiles = gl.cdiv(tokens, GROUPS * TOKENS), gl.cdiv(columns, COLUMNS)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), token_tiles * column_tiles, gl.num_programs(0)):
        i, j = _place(tile, token_tiles, column_tiles)
        for k in range(0, inner, STEP):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (GROUPS * TOKENS + 2 * COLUMNS) * STEP * 2)
            for group in gl.static_range(GROUPS):
                own = rows.index(stage * GROUPS + group)
                tma.async_copy_global_to_shared(x, [(i * GROUPS + group) * TOKENS, k], bar, own)
            pair = pairs.index(stage)
            tma.async_copy_global_to_shared(weight, [j * COLUMNS, k], bar, pair.slice(0, COLUMNS, 0))
            tma.async_copy_global_to_shared(weight, [columns + j * COLUMNS, k], bar, pair.slice(COLUMNS, COLUMNS, 0))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _multiply(out, rows, pairs, room, full, empty, tokens, columns, inner, GROUP: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    token_tiles, column_tiles = gl.cdiv(tokens, GROUPS * TOKENS), gl.cdiv(columns, COLUMNS)
    stage = 0
    phase = 0
    if GROUP > 0:  # rows are longer than LAG stages, so that this one fills
        mbarrier.wait(full.index(min(LAG * GROUP, STAGES - 1)), 0)
    for tile in range(gl.program_id(0), token_tiles * column_tiles, gl.num_programs(0)):
        i, j = _place(tile, token_tiles, column_tiles)
        total = gl.zeros([TOKENS, 2 * COLUMNS], gl.float32, LAYOUT)
        mbarrier.wait(full.index(stage), phase)
        own, pair = rows.index(stage * GROUPS + GROUP), pairs.index(stage).permute([1, 0])
        # Outside of the loop, so that `before` and `stage` differ at its start: of two names of one value it carries one.
        total = warpgroup_mma(own, pair, total, use_acc=False, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        before = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        for _ in range(STEP, inner, STEP):
            mbarrier.wait(full.index(stage), phase)
            own, pair = rows.index(stage * GROUPS + GROUP), pairs.index(stage).permute([1, 0])
            total = warpgroup_mma(own, pair, total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])  # this step's product stays under way; the one before is done
            mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index(before), count=1)
        gate, up = total.reshape([TOKENS, 2, COLUMNS]).permute([0, 2, 1]).split()
        result = (gate * up / (1.0 + gl.exp(-gate))).to(out.dtype)
        own_room = room.index(GROUP)
        tma.store_wait(0)  # the store before has read it
        gl.thread_barrier()
        own_room.store(result)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [(i * GROUPS + GROUP) * TOKENS, j * COLUMNS], own_room)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens"])
def project_gated(x, weight, out, tokens, columns, inner):
    """x (tokens, inner); weight (2 columns, inner), gates before ups; out (tokens, columns)."""
    rows = gl.allocate_shared_memory(x.dtype, [STAGES * GROUPS, TOKENS, STEP], x.layout)
    pairs = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * COLUMNS, STEP], weight.layout)
    room = gl.allocate_shared_memory(x.dtype, [GROUPS, TOKENS, COLUMNS], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    gl.warp_specialize(
        [
            (_multiply, (out, rows, pairs, room, full, empty, tokens, columns, inner, 0)),
            (_multiply, (out, rows, pairs, room, full, empty, tokens, columns, inner, 1)),
            (_load, (x, weight, rows, pairs, full, empty, tokens, columns, inner)),
        ],
        [4, 1],
        [MANY, FEW],
    )
