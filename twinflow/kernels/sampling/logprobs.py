"""Log-probabilities of drawn tokens and of the best ones, for the rows that ask. Semantics: `reference.token_logprobs`."""

import torch
import triton
import triton.language as tl

from twinflow.kernels.sampling.row import LOW_BITS, key_value, order_key
from twinflow.kernels.triton_tools import power_of_2

_TILE = 4096
NOTHING = tl.constexpr(-(1 << 62))  # below every packed key


def token_logprobs(
    logits: torch.Tensor, picks: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    lines, vocab = len(picks), logits.shape[1]
    values = torch.empty(lines, 1 + top, dtype=torch.float32, device=logits.device)
    ids = torch.empty(lines, top, dtype=torch.int64, device=logits.device)
    if lines == 0:
        return values, ids
    tiles = triton.cdiv(vocab, _TILE)
    best = torch.empty(lines, tiles, max(top, 1), dtype=torch.int64, device=logits.device)
    sums = torch.empty(lines, tiles, 2, dtype=torch.float32, device=logits.device)
    _best_of_tile[(lines, tiles)](
        logits, logits.stride(0), picks, best, sums, vocab, tiles, top, max(top, 1), TILE=_TILE, num_warps=8
    )
    _merge_tiles[(lines,)](
        logits,
        logits.stride(0),
        picks,
        tokens,
        best,
        sums,
        values,
        ids,
        tiles,
        top,
        max(top, 1),
        TILES=power_of_2(tiles),
        TOP=power_of_2(top, least=32),  # one variant for what requests may ask
        num_warps=8,
    )
    return values, ids


@triton.jit(do_not_specialize=["V", "tiles", "top", "line"])
def _best_of_tile(logits, stride, picks, best, sums, V, tiles, top, line, TILE: tl.constexpr):
    """Grid (m, tiles). The `top` best of a tile as packed keys, its largest logit and the sum of exponentials below it."""
    m = tl.program_id(0)
    tile = tl.program_id(1)
    place = m.to(tl.int64) * tiles + tile
    col = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + tl.load(picks + m) * stride + col, mask=col < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)
    largest = tl.max(x, 0)
    terms = tl.where(x > float("-inf"), tl.exp(x - tl.where(largest > float("-inf"), largest, 0.0)), 0.0)
    tl.store(sums + place * 2, largest)
    tl.store(sums + place * 2 + 1, tl.sum(terms, 0))
    packed = (order_key(x).to(tl.int64) << 31) | (col ^ LOW_BITS).to(tl.int64)
    packed = tl.where(col < V, packed, NOTHING)
    for t in range(top):
        found = tl.max(packed, 0)
        tl.store(best + place * line + t, found)
        packed = tl.where(packed == found, NOTHING, packed)


@triton.jit(do_not_specialize=["tiles", "top", "line"])
def _merge_tiles(
    logits, stride, picks, tokens, best, sums, values, ids, tiles, top, line, TILES: tl.constexpr, TOP: tl.constexpr
):
    """Grid (m,). Tiles are added up in their order, whatever else is in the batch."""
    m = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, TILES)
    largest = tl.load(sums + (m * tiles + t) * 2, mask=t < tiles, other=float("-inf"))
    terms = tl.load(sums + (m * tiles + t) * 2 + 1, mask=t < tiles, other=0.0)
    peak = tl.max(largest, 0)
    log_sum = tl.log(tl.sum(tl.where(largest > float("-inf"), terms * tl.exp(largest - peak), 0.0), 0))
    row = tl.load(picks + m)
    own = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(values + m * (top + 1), own - peak - log_sum)
    at = tl.arange(0, TILES * TOP)
    tile, place = at // TOP, at % TOP
    packed = tl.load(best + (m * tiles + tile) * line + place, mask=(tile < tiles) & (place < top), other=NOTHING)
    for i in range(top):
        found = tl.max(packed, 0)
        packed = tl.where(packed == found, NOTHING, packed)
        tl.store(ids + m * top + i, (found & LOW_BITS) ^ LOW_BITS)
        tl.store(values + m * (top + 1) + 1 + i, key_value((found >> 31).to(tl.int32)) - peak - log_sum)
