"""One tile of keys and values from the paged cache, and the online softmax over it (Milakov & Gimelshein 2018), in Triton."""

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    q,
    acc,
    top,
    total,
    k_cache,
    v_cache,
    table,
    head_offset,
    first,
    context,
    last_key,
    scale_log2,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys first .. first+TILE-1 for the query rows q (M, WIDTH); acc (M, WIDTH), top (maximum, base 2) and total (M,) fp32
    go in and come out. With MASKED, keys from `context` on or beyond a row's `last_key` (M,) count as absent: they are not
    read, so that uninitialised memory never reaches a result. Blocks of -1 count as absent in any case."""
    n = first + tl.arange(0, TILE)
    col = tl.arange(0, WIDTH)
    if BLOCK_TOKENS % TILE == 0:
        # The whole tile lies in one block.
        page = tl.load(table + first // BLOCK_TOKENS).to(tl.int64)
        start = page * PAGE_STRIDE + head_offset
        at = start + (n % BLOCK_TOKENS)[:, None] * TOKEN_STRIDE + col[None, :]
        there = (n >= 0) & (page >= 0)
        if MASKED:
            there = there & (n < context)
    else:
        page = tl.load(table + n // BLOCK_TOKENS, mask=n < context, other=-1).to(tl.int64)
        at = (page * PAGE_STRIDE + (n % BLOCK_TOKENS) * TOKEN_STRIDE)[:, None] + head_offset + col[None, :]
        there = page >= 0
    if DIM == WIDTH:
        inside = there[:, None]
    else:
        inside = there[:, None] & (col < DIM)[None, :]
    k = tl.load(k_cache + at, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    if MASKED:
        scores = tl.where((n[None, :] <= last_key[:, None]) & there[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key yet stays at -inf; 0 in its place keeps -inf - -inf out of the exponents.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    v = tl.load(v_cache + at, mask=inside, other=0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_top, total
