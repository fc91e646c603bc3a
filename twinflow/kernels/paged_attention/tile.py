"""Tiles of keys and values of the paged cache, and the online softmax over them (Milakov & Gimelshein 2018), in Triton.

A tile comes through a tensor descriptor (one request to the tensor memory accelerator, no addresses in registers) where
the cache allows it, else through pointers. Both give zeros where there is no block.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twinflow.kernels.triton_tools import dot_precision, power_of_2, shared_bytes

MOST_ROWS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TiledCache:
    """What kernels read K and V through: descriptors or the tensors themselves, and the constants that go with them."""

    keys: torch.Tensor | TensorDescriptor
    values: torch.Tensor | TensorDescriptor
    tile: int
    constants: dict[str, int | bool | str]


def tiled(k_cache: torch.Tensor, v_cache: torch.Tensor, tile: int, *, described: bool = True) -> TiledCache:
    """In tiles of at most `tile` keys, through descriptors where the cache allows it and `described` does not forbid it."""
    _, _, block_tokens, dim = k_cache.shape
    tile = min(tile, power_of_2(block_tokens))
    described = described and can_describe(k_cache, tile) and can_describe(v_cache, tile)
    keys, values = (describe(c, tile) if described else c for c in (k_cache, v_cache))
    constants = {
        "PAGE_STRIDE": k_cache.stride(0),
        "HEAD_STRIDE": k_cache.stride(1),
        "TOKEN_STRIDE": k_cache.stride(2),
        "BLOCK_TOKENS": block_tokens,
        "DIM": dim,
        "WIDTH": power_of_2(dim),
        "TILE": tile,
        "DESCRIBED": described,
        "PRECISION": dot_precision(k_cache.dtype),
    }
    return TiledCache(keys, values, tile, constants)


def can_describe(cache: torch.Tensor, tile: int) -> bool:
    """Whether a descriptor can address `cache` (blocks, Hkv, block_tokens, D) as rows of D, `tile` at a time: a tile must not
    cross a block; half types only, since what multiplies fp32 exactly reads registers anyway; from Hopper on, since before
    it a descriptor is emulated, slowly."""
    dim, strides = cache.shape[3], cache.stride()
    return (
        (cache.device.type == "cpu" or torch.cuda.get_device_capability(cache.device) >= (9, 0))
        and cache.dtype.itemsize == 2
        and dim % 16 == 0
        and dim == triton.next_power_of_2(dim)
        and strides[2:] == (dim, 1)
        and strides[0] % dim == strides[1] % dim == 0
        and cache.shape[2] % tile == 0
        and cache.data_ptr() % 16 == 0
        and cache.shape[0] * strides[0] // dim <= MOST_ROWS
    )


def describe(cache: torch.Tensor, tile: int) -> TensorDescriptor:
    """Of all tokens of all heads and blocks, other layers' in between, as rows of D."""
    blocks, heads, block_tokens, dim = cache.shape
    rows = ((blocks - 1) * cache.stride(0) + (heads - 1) * cache.stride(1)) // dim + block_tokens
    return TensorDescriptor(cache, [rows, dim], [dim, 1], [tile, dim])


def tall_tile(device: torch.device, dim: int) -> tuple[int, int]:
    """Keys of a tile, and loads ahead, beside 128 rows of queries in half precision, within the GPU's shared memory."""
    shared = shared_bytes(device)
    if dim <= 128 or shared >= 200 << 10:
        return 64, 2
    return (64, 1) if shared >= 120 << 10 else (32, 1)


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
def mass_of(top, total):
    """What a part weighs: the logarithm (base 2) of the sum of its exponentials, -inf without keys."""
    return tl.where(total > 0.0, top + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))


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
