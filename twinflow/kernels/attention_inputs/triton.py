"""q/k norms, rotary embedding and the cache write in one kernel. Semantics: `reference.py`.

A program takes one token: a tile of query heads, or all its key and value heads. Between norm and rotation nothing is
rounded. Rows with slot -1 write nothing.
"""

import torch
import triton
import triton.language as tl

from twinflow.kernels.base import HeadNorm
from twinflow.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from twinflow.kernels.triton_tools import multiprocessors, power_of_2

TILE = 4096  # elements of a tile of query heads


def attention_inputs(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_slots: torch.Tensor | None,
    *,
    warps: int | None = None,
    together: bool | None = None,
    early: bool | None = None,
) -> torch.Tensor | None:
    """warps, together (one program for all of a token), early: tuning. Few tokens are a matter of latency: many threads, K
    and V beside q; of many tokens, small programs have the most bytes on their way."""
    given = [x for x in (q, k, v) if x is not None]
    tokens, _, dim = given[0].shape
    for x in given:
        if x.stride(2) != 1 or x.stride(1) != dim:
            raise ValueError(f"heads must lie side by side, strides are {x.stride()}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(f"K and V must lie alike, strides are {k_cache.stride()} and {v_cache.stride()}")
    untouched = q is None or (q_norm is None and cos is None)
    out = q if untouched else torch.empty(q.shape, dtype=q.dtype, device=q.device)  # type: ignore[union-attr]
    if tokens == 0 or (untouched and k is None):
        return out
    width, heads, kv_heads = power_of_2(dim), 0 if q is None else q.shape[1], 0 if k is None else k.shape[1]
    per_tile = min(power_of_2(heads, 1), max(1, TILE // width))
    tiles = 0 if untouched else triton.cdiv(heads, per_tile)
    device = k_cache.device
    many = tokens >= 16 * multiprocessors(device)
    together = k is not None and tiles == 1 and (many if together is None else together)
    if warps is None:
        warps = 1 if many else 4
    if early is None:
        early = dependent_launch(device)
    q, k, v = (given[0] if x is None else x for x in (q, k, v))
    _prepare[(tokens, tiles + (kv_heads > 0 and not together))](
        q,
        k,
        v,
        q_norm.weight if q_norm else q,
        k_norm.weight if k_norm else q,
        cos if cos is not None else q,
        sin if sin is not None else q,
        k_cache,
        v_cache,
        q if kv_slots is None else kv_slots,
        q if out is None else out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        q_norm.eps if q_norm else 0.0,
        k_norm.eps if k_norm else 0.0,
        PAGE_STRIDE=k_cache.stride(0),
        HEAD_STRIDE=k_cache.stride(1),
        TOKEN_STRIDE=k_cache.stride(2),
        BLOCK_TOKENS=k_cache.shape[2],
        TILES=tiles,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        WIDTH=width,
        PER_TILE=per_tile,
        KV_TILE=power_of_2(kv_heads, 1),
        HALF=cos.shape[-1] if cos is not None else 0,
        Q_NORM=_kind(q_norm),
        K_NORM=_kind(k_norm),
        TOGETHER=together,
        EARLY=early,
        launch_pdl=early,
        num_warps=warps,
    )
    return out


def _kind(norm: HeadNorm | None) -> int:
    return 0 if norm is None else 1 + norm.unit_offset


@triton.jit
def _prepare(
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    k_cache,
    v_cache,
    kv_slots,
    out,
    q_stride,
    k_stride,
    v_stride,
    q_eps,
    k_eps,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    HALF: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    TOGETHER: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    col = tl.arange(0, WIDTH)
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    if TOGETHER or tile < TILES:
        head = tile * PER_TILE + tl.arange(0, PER_TILE)
        live = (head < HEADS)[:, None] & (col < DIM)[None, :]
        y = _turned(q + token * q_stride, q_weight, cos, sin, token, head, live, q_eps, DIM, WIDTH, HALF, Q_NORM)
        at = token * HEADS * DIM + head[:, None] * DIM + col[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=live)
    if KV_HEADS > 0:  # noqa: SIM102 (decided when it is compiled)
        if TOGETHER or tile >= TILES:
            slot = tl.load(kv_slots + token)
            if slot >= 0:
                kv_head = tl.arange(0, KV_TILE)
                there = (kv_head < KV_HEADS)[:, None] & (col < DIM)[None, :]
                key = _turned(
                    k + token * k_stride, k_weight, cos, sin, token, kv_head, there, k_eps, DIM, WIDTH, HALF, K_NORM
                )
                value = tl.load(v + token * v_stride + kv_head[:, None] * DIM + col[None, :], mask=there, other=0.0)
                place = (slot // BLOCK_TOKENS) * PAGE_STRIDE + (slot % BLOCK_TOKENS) * TOKEN_STRIDE
                to = place + kv_head[:, None] * HEAD_STRIDE + col[None, :]
                tl.store(k_cache + to, key.to(k_cache.dtype.element_ty), mask=there)
                tl.store(v_cache + to, value.to(v_cache.dtype.element_ty), mask=there)


@triton.jit
def _turned(
    x,
    weight,
    cos,
    sin,
    token,
    head,
    live,
    eps,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads of one token, normed and turned, fp32. NORM: 0 none, 1 plain, 2 with unit offset."""
    col = tl.arange(0, WIDTH)
    y = tl.load(x + head[:, None] * DIM + col[None, :], mask=live, other=0.0).to(tl.float32)
    if NORM > 0:
        rms = tl.rsqrt(tl.sum(y * y, 1) / DIM + eps)[:, None]
        y = y * rms * _weight(weight, col, col < DIM, NORM)[None, :]
    if HALF > 0:
        # The other dim of each pair is read once more rather than moved between threads; it comes from the L1 cache.
        pair = tl.where(col < HALF, col + HALF, col - HALF)
        turns = col < 2 * HALF
        other = tl.load(x + head[:, None] * DIM + pair[None, :], mask=live & turns[None, :], other=0.0).to(tl.float32)
        if NORM > 0:
            other = other * rms * _weight(weight, pair, turns, NORM)[None, :]
        angle = token * HALF + tl.where(col < HALF, col, col - HALF)
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        y = y * c[None, :] + other * tl.where(col < HALF, -s, s)[None, :]
    return y


@triton.jit
def _weight(weight, at, live, NORM: tl.constexpr):
    w = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    if NORM == 2:
        w = w + 1.0
    return w
