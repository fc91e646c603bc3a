"""How the work of one-query attention is divided over programs, computed alike by those that do it and those that collect."""

import triton
import triton.language as tl


@triton.jit
def pair_tiles(
    context_lens,
    own_starts,
    cu_seqlens,
    sequences,
    SEQUENCES: tl.constexpr,
    TILE: tl.constexpr,
    ALL_ONE: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Tiles of own keys of each sequence, (SEQUENCES,) int32; 0 for those without exactly one query."""
    seq = tl.arange(0, SEQUENCES)
    live = seq < sequences
    keys = tl.load(context_lens + seq, mask=live, other=0)
    if SHARED:
        keys -= tl.load(own_starts + seq, mask=live, other=0)
    if not ALL_ONE:
        queries = tl.load(cu_seqlens + seq + 1, mask=live, other=0) - tl.load(cu_seqlens + seq, mask=live, other=0)
        keys = tl.where(queries == 1, keys, 0)
    return tl.cdiv(tl.maximum(keys, 0), TILE)


@triton.jit
def prefix_shares(
    prefixes,
    programs,
    PREFIXES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of each prefix, (PREFIXES,) int32: its first place, tiles of SEQUENCES rows, chunks of its keys, and its first unit. A
    unit is one (kv head, chunk, tile of rows), the last running fastest, so that programs side by side read the same keys;
    chunks are as many as give each of `programs` about one unit."""
    at = tl.arange(0, PREFIXES) * 4
    begins = tl.load(prefixes + at)
    row_tiles = tl.cdiv(tl.load(prefixes + at + 1) - begins, SEQUENCES)
    blocks = tl.load(prefixes + at + 3) - tl.load(prefixes + at + 2)
    tiles = tl.cdiv(blocks * BLOCK_TOKENS, TILE)
    pairs = row_tiles * KV_HEADS
    work = tl.maximum(tl.sum(pairs * tiles, 0), 1)
    chunks = tl.minimum(tl.maximum(programs * tiles // work, 1), tl.maximum(tiles, 1))
    units = pairs * chunks
    return begins, row_tiles, chunks, tl.cumsum(units, 0) - units
