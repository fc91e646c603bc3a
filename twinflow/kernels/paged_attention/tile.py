"""Tiles of keys and values of the paged cache, and the online softmax over them (Milakov & Gimelshein 2018), in Triton.

A tile comes through a tensor descriptor (one request to the tensor memory accelerator, no addresses in registers) where
the cache allows it, else through pointers. Both give zeros where there is no block.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_ROWS = 2**31 - 1


def tile_source(cache: torch.Tensor, tile: int) -> tuple[torch.Tensor | TensorDescriptor, bool]:
    """What kernels read `cache` (blocks, Hkv, block_tokens, D) through, and whether it is a descriptor.

    The descriptor sees all tokens of all heads and blocks as rows of D, with other layers in between; a tile is `tile` of
    them, so it must not cross a block, and half types only: what multiplies fp32 exactly reads registers anyway.
    """
    blocks, heads, block_tokens, dim = cache.shape
    strides = cache.stride()
    rows = ((blocks - 1) * strides[0] + (heads - 1) * strides[1]) // dim + block_tokens
    fits = (
        cache.dtype.itemsize == 2
        and dim % 16 == 0
        and dim == triton.next_power_of_2(dim)
        and strides[2] == dim
        and strides[0] % dim == strides[1] % dim == 0
        and block_tokens % tile == 0
        and cache.data_ptr() % 16 == 0
        and rows <= MOST_ROWS
    )
    return (TensorDescriptor(cache, [rows, dim], [dim, 1], [tile, dim]), True) if fits else (cache, False)


@triton.jit
def page_of(table, first, end, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr):
    """The block that key `first` lies in, -1 from `end` on. Loops fetch it a tile ahead, since all else waits for it. Where
    tiles cross blocks it means nothing."""
    page = -1
    if BLOCK_TOKENS % TILE == 0:
        page = tl.load(table + first // BLOCK_TOKENS, mask=first < end, other=-1)
    return page


@triton.jit
def locate(
    table,
    page,
    kv_head,
    first,
    end,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Where keys first .. first+TILE-1 lie: a row of the descriptor, or offsets (TILE,) int64; and which exist: (TILE,), or
    one flag for all without MASKED, where the tile must lie in one block."""
    n = first + tl.arange(0, TILE)
    if BLOCK_TOKENS % TILE == 0:
        there = page >= 0
        if MASKED:
            there = there & (n < end)
        if DESCRIBED:
            inside = kv_head * (HEAD_STRIDE // TOKEN_STRIDE) + first % BLOCK_TOKENS
            at = tl.where(page >= 0, page * (PAGE_STRIDE // TOKEN_STRIDE) + inside, -TILE)
        else:
            at = page.to(tl.int64) * PAGE_STRIDE + kv_head * HEAD_STRIDE + (n % BLOCK_TOKENS) * TOKEN_STRIDE
    else:
        pages = tl.load(table + n // BLOCK_TOKENS, mask=n < end, other=-1)
        there = pages >= 0
        at = pages.to(tl.int64) * PAGE_STRIDE + kv_head * HEAD_STRIDE + (n % BLOCK_TOKENS) * TOKEN_STRIDE
    return at, there


@triton.jit
def read(cache, at, there, DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, DESCRIBED: tl.constexpr):
    """The tile (TILE, WIDTH) at `at`. Absent tokens are 0, whatever lies there; without MASKED only whole tiles can be."""
    if DESCRIBED:
        x = cache.load([at, 0])
        if MASKED:
            x = tl.where(there[:, None], x, 0.0)
    else:
        col = tl.arange(0, WIDTH)
        inside = (col < DIM)[None, :]
        if MASKED:
            inside = inside & there[:, None]
        else:
            inside = inside & there
        x = tl.load(cache + at[:, None] + col[None, :], mask=inside, other=0.0)
    return x


@triton.jit
def bias_of(there):
    return tl.where(there, 0.0, float("-inf"))


@triton.jit
def absorb(scores, acc, top, total, scale_log2, bias):
    """Online softmax over scores (M, TILE), times scale_log2 > 0 in base 2, plus bias (0, or -inf: none of them exists):
    weights (M, TILE), and acc, top, total rescaled to the new top."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2 + bias)
    # A row that has seen no key yet stays at -inf; 0 in its place keeps -inf - -inf out of the exponents.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale_log2 + (bias - base)[:, None])
    shrink = tl.exp2(top - base)
    return weights, acc * shrink[:, None], new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def attend_tile(
    q,
    acc,
    top,
    total,
    k_cache,
    v_cache,
    table,
    page,
    kv_head,
    first,
    end,
    last_key,
    scale_log2,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys first .. first+TILE-1 for the query rows q (M, WIDTH); acc (M, WIDTH), top (maximum, base 2) and total (M,) fp32
    go in and come out. With MASKED, keys from `end` on or beyond a row's `last_key` (M,) count as absent and their values as
    0, so that uninitialised memory never reaches a result. Blocks of -1 count as absent in any case."""
    at, there = locate(
        table, page, kv_head, first, end, PAGE_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, BLOCK_TOKENS, TILE, MASKED, DESCRIBED
    )
    if MASKED and not DESCRIBED:
        k = read(k_cache, at, there, DIM, WIDTH, True, False)
    else:
        k = read(
            k_cache, at, there, DIM, WIDTH, False, DESCRIBED
        )  # a NaN key spoils only its own score, replaced below
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    bias = 0.0
    if MASKED:
        n = first + tl.arange(0, TILE)
        scores = tl.where((n[None, :] <= last_key[:, None]) & there[None, :], scores, float("-inf"))
    else:
        bias = bias_of(there)
    weights, acc, top, total = absorb(scores, acc, top, total, scale_log2, bias)
    v = read(v_cache, at, there, DIM, WIDTH, MASKED, DESCRIBED)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total


@triton.jit
def attend_tiles(
    q,
    acc,
    top,
    total,
    k_cache,
    v_cache,
    table,
    kv_head,
    low,
    high,
    end,
    last_key,
    scale_log2,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`attend_tile` for keys low .. high-1, tile by tile."""
    page = page_of(table, low, high, BLOCK_TOKENS, TILE)
    for first in range(low, high, TILE):
        here = page
        page = page_of(table, first + TILE, high, BLOCK_TOKENS, TILE)
        acc, top, total = attend_tile(
            q, acc, top, total, k_cache, v_cache, table, here, kv_head, first, end, last_key, scale_log2,
            PAGE_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, BLOCK_TOKENS, DIM, WIDTH, TILE, MASKED, DESCRIBED, PRECISION,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def attend_whole_tiles(
    q,
    acc,
    top,
    total,
    k_cache,
    v_cache,
    table,
    kv_head,
    low,
    high,
    scale_log2,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys low .. high-1, which every row sees, in tiles that lie in one block each. The scores of the next tile are begun
    before the softmax of this one, so that the matrix unit has work meanwhile."""
    if low < high:
        page = page_of(table, low, high, BLOCK_TOKENS, TILE)
        next_page = page_of(table, low + TILE, high, BLOCK_TOKENS, TILE)
        at, there = locate(
            table,
            page,
            kv_head,
            low,
            high,
            PAGE_STRIDE,
            HEAD_STRIDE,
            TOKEN_STRIDE,
            BLOCK_TOKENS,
            TILE,
            False,
            DESCRIBED,
        )
        k = read(k_cache, at, there, DIM, WIDTH, False, DESCRIBED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        for first in range(low + TILE, high, TILE):
            next_at, next_there = locate(
                table, next_page, kv_head, first, high,
                PAGE_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, BLOCK_TOKENS, TILE, False, DESCRIBED,
            )  # fmt: skip
            next_page = page_of(table, first + TILE, high, BLOCK_TOKENS, TILE)
            k = read(k_cache, next_at, next_there, DIM, WIDTH, False, DESCRIBED)
            next_scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weights, acc, top, total = absorb(scores, acc, top, total, scale_log2, bias_of(there))
            v = read(v_cache, at, there, DIM, WIDTH, False, DESCRIBED)
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            at, there, scores = next_at, next_there, next_scores
        weights, acc, top, total = absorb(scores, acc, top, total, scale_log2, bias_of(there))
        v = read(v_cache, at, there, DIM, WIDTH, False, DESCRIBED)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total
