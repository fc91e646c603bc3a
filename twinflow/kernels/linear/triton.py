"""Projections on a GPU. Semantics: `reference.py`.

One token of half precision: products on the vector units. A few: on the matrix units, weights on their long side and tokens
on the short one, so that 8 tokens waste nothing. Both are bound by the read of the weights. More tokens: the library's, or
for gate and up of many `hopper.py`'s where that can run.
fp32: one way whatever the number of tokens, so that a token's result does not depend on who else is in the batch.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from twinflow.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from twinflow.kernels.gating.triton import swiglu
from twinflow.kernels.linear import hopper
from twinflow.kernels.linear.tiles import Tile, choose_tile
from twinflow.kernels.triton_tools import EXACT, FAST, multiprocessors, shared_bytes, sigmoid

EXACT_TILE = Tile(rows=64, padded=64, tokens=32, inner=32, stages=3, warps=4)
VECTOR_ROWS = 8192  # from so many rows of the weights on, a program of the vector units takes twice as many


def linear(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x (T, in) with any row stride, weight (out, in) contiguous."""
    dtype = dtype or x.dtype
    if _one_token(x):
        return _vector(x, weight, weight.shape[0], dtype, out=out)
    tile = _tile(x, weight)
    if tile is not None:
        return _matrix(x, weight, weight.shape[0], dtype, tile, out=out)
    if dtype == x.dtype or not x.shape[0]:
        return torch.mm(x, weight.t(), out=out).to(dtype)
    return torch.mm(x, weight.t(), out_dtype=dtype, out=out)  # the sums as they are, not rounded to x's type before


def linear_residual(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x (T, in) with any row stride, weight (out, in) and residual (T, out) contiguous."""
    if _one_token(x):
        return residual, _vector(x, weight, weight.shape[0], x.dtype)
    tile = _tile(x, weight, partial=True)
    if tile is None:
        return torch.addmm(residual, x, weight.t(), out=residual), None
    return residual, _matrix(x, weight, weight.shape[0], x.dtype if tile.parts == 1 else torch.float32, tile)


def linear_swiglu(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """x (T, in) with any row stride, gate_up (2n, in) contiguous."""
    rows = gate_up.shape[0] // 2
    if _one_token(x):
        return _vector(x, gate_up, rows, x.dtype, gated=True)
    tile = _tile(x, gate_up, gated=True)
    if tile is not None:
        return _matrix(x, gate_up, rows, x.dtype, tile, gated=True)
    if hopper.faster(x, gate_up):
        return hopper.project_gated(x, gate_up)
    return swiglu(F.linear(x, gate_up))


def _one_token(x: torch.Tensor) -> bool:
    return x.shape[0] == 1 and x.dtype != torch.float32


def _tile(x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False, partial: bool = False) -> Tile | None:
    tokens, inner = x.shape
    if x.dtype == torch.float32:
        return EXACT_TILE if tokens else None
    return choose_tile(
        tokens,
        weight.shape[0] // (1 + gated),
        inner,
        gated=gated,
        partial=partial,
        multiprocessors=multiprocessors(x.device),
        shared_bytes=shared_bytes(x.device),
    )


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if not weight.is_contiguous() or x.stride(-1) != 1:
        raise ValueError(f"weights must be contiguous, and rows of x: strides {weight.stride()} and {x.stride()}")


def _vector(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    _check(x, weight)
    if out is None:
        out = torch.empty(1, rows, dtype=dtype, device=x.device)
    own, stages, warps = (8, 3, 4) if weight.shape[0] >= VECTOR_ROWS and not gated else (4, 4, 2)
    early = dependent_launch(x.device)
    _project_one[(triton.cdiv(rows, own),)](
        x,
        weight,
        out,
        rows,
        x.shape[1],
        ROWS=own,
        STEP=512,
        STAGES=stages,
        GATED=gated,
        EARLY=early,
        launch_pdl=early,
        num_warps=warps,
    )
    return out


def _matrix(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: int,
    dtype: torch.dtype,
    tile: Tile,
    *,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """(T, rows), or (parts, T, rows) where a tile has several."""
    _check(x, weight)
    tokens, inner = x.shape
    if out is None:
        shape = (tokens, rows) if tile.parts == 1 else (tile.parts, tokens, rows)
        out = torch.empty(shape, dtype=dtype, device=x.device)
    token_tiles, early = triton.cdiv(tokens, tile.tokens), dependent_launch(x.device)
    _project[(triton.cdiv(rows, tile.rows) * token_tiles, tile.parts)](
        x,
        weight,
        out,
        tokens,
        rows,
        inner,
        x.stride(0),
        token_tiles,
        OWN=tile.rows,
        PADDED=tile.padded,
        TOKENS=tile.tokens,
        STEP=tile.inner,
        STAGES=tile.stages,
        EVEN=inner % tile.inner == 0,
        GATED=gated,
        PRECISION=EXACT if x.dtype == torch.float32 else FAST,
        EARLY=early,
        launch_pdl=early,
        num_warps=tile.warps,
    )
    return out


@triton.jit
def _project_one(
    x,
    weight,
    out,
    rows,
    inner,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Every thread adds up columns of its own; the sum over them comes last."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, STEP)
    weight_at = weight + (tl.minimum(row, rows - 1).to(tl.int64) * inner)[:, None] + k[None, :]
    total = tl.zeros((ROWS, STEP), tl.float32)
    up = tl.zeros((ROWS, STEP), tl.float32)
    wait_for_previous(EARLY)
    for at in tl.range(0, inner, STEP, num_stages=STAGES):
        live = at + k < inner
        part = tl.load(x + at + k, mask=live, other=0.0).to(tl.float32)[None, :]
        total += tl.load(weight_at + at, mask=live[None, :], other=0.0).to(tl.float32) * part
        if GATED:
            more = weight_at + rows.to(tl.int64) * inner + at
            up += tl.load(more, mask=live[None, :], other=0.0).to(tl.float32) * part
    let_next_start(EARLY)
    result = tl.sum(total, 1)
    if GATED:
        result = result * sigmoid(result) * tl.sum(up, 1)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < rows)


@triton.jit(do_not_specialize=["tokens", "token_tiles"])
def _project(
    x,
    weight,
    out,
    tokens,
    rows,
    inner,
    x_stride,
    token_tiles,
    OWN: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    i = tl.arange(0, PADDED)
    row = (tl.program_id(0) // token_tiles) * OWN + i
    mine = (i < OWN) & (row < rows)
    token = (tl.program_id(0) % token_tiles) * TOKENS + tl.arange(0, TOKENS)
    part, parts = tl.program_id(1), tl.num_programs(1)
    steps = tl.cdiv(inner, STEP)
    k = tl.arange(0, STEP)
    weight_at = weight + (row.to(tl.int64) * inner)[:, None] + k[None, :]
    known = (token < tokens)[None, :]
    x_at = x + (token.to(tl.int64) * x_stride)[None, :] + k[:, None]
    up_at = weight_at + rows.to(tl.int64) * inner
    total = tl.zeros((PADDED, TOKENS), tl.float32)
    up = tl.zeros((PADDED, TOKENS), tl.float32)
    wait_for_previous(EARLY)
    for step in tl.range(part * steps // parts, (part + 1) * steps // parts, num_stages=STAGES):
        at = step * STEP
        if EVEN:
            live = mine[:, None]
            columns = tl.load(x_at + at, mask=known, other=0.0)
        else:
            live = mine[:, None] & (at + k < inner)[None, :]
            columns = tl.load(x_at + at, mask=known & (at + k < inner)[:, None], other=0.0)
        total = tl.dot(tl.load(weight_at + at, mask=live, other=0.0), columns, total, input_precision=PRECISION)
        if GATED:
            up = tl.dot(tl.load(up_at + at, mask=live, other=0.0), columns, up, input_precision=PRECISION)
    let_next_start(EARLY)
    if GATED:
        total = total * sigmoid(total) * up
    place = (part * tokens + token).to(tl.int64) * rows
    tl.store(
        out + place[None, :] + row[:, None],
        total.to(out.dtype.element_ty),
        mask=mine[:, None] & known,
    )
