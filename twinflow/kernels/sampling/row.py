"""Device functions of the sampling kernels: a tile of a row's adjusted logits, keys that order them, integer weights."""

import torch
import triton
import triton.language as tl

from twinflow.kernels.sampling import tables as of
from twinflow.kernels.triton_tools import multiprocessors

WORDS = tl.constexpr(of.WORDS)
TEMPERATURE = tl.constexpr(of.TEMPERATURE)
TOP_P = tl.constexpr(of.TOP_P)
MIN_P = tl.constexpr(of.MIN_P)
REPETITION = tl.constexpr(of.REPETITION)
PRESENCE = tl.constexpr(of.PRESENCE)
FREQUENCY = tl.constexpr(of.FREQUENCY)
TOP_K = tl.constexpr(of.TOP_K)
MIN_TOKENS = tl.constexpr(of.MIN_TOKENS)
HISTORY = tl.constexpr(of.HISTORY)
EDIT_START = tl.constexpr(of.EDIT_START)
EDIT_COUNT = tl.constexpr(of.EDIT_COUNT)
COUNT_MASK = tl.constexpr(of.COUNT_MASK)
BAN_BIT = tl.constexpr(of.BAN_BIT)
EDIT_BLOCK = tl.constexpr(of.EDIT_BLOCK)
WEIGHT_ONE = tl.constexpr(float(1 << of.WEIGHT_BITS))

LOW_BITS = tl.constexpr((1 << 31) - 1)
LEAST_KEY = tl.constexpr(-(1 << 31) + (1 << 23) - 1)  # of -inf
LOG2E = tl.constexpr(1.4426950408889634)

# Words of a row's scratch record, (n, SCRATCH) int64, zero before the first kernel.
SCRATCH = tl.constexpr(32)
BEST, SUM, SQUARES, COUNT = (tl.constexpr(i) for i in range(4))
FILLED, TOTAL, FROM_LOW, FROM_HIGH, THRESHOLD, QUOTA = (tl.constexpr(i) for i in range(4, 10))
SHARES = tl.constexpr(16)


def splits_for(rows: int, vocab: int, tile: int, programs: int, device: torch.device) -> int:
    """Programs per row, so that each multiprocessor gets about `programs`, of whole tiles."""
    wanted = max(1, programs * multiprocessors(device) // rows)
    tiles = triton.cdiv(vocab, tile)
    return triton.cdiv(tiles, triton.cdiv(tiles, min(wanted, tiles)))


@triton.jit
def float_word(record, WORD: tl.constexpr):
    return tl.load(record + WORD).to(tl.float64, bitcast=True)


@triton.jit
def order_key(x):
    """int32 keys that order fp32 as numbers (-0.0 below 0.0); not for NaN."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & LOW_BITS)


@triton.jit
def key_value(key):
    """The fp32 of a key."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & LOW_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def best_value(best):
    """The largest logit of a row from its packed BEST word: the key in the upper bits, LOW_BITS - id below."""
    return key_value((best >> 31) - (1 << 31))


@triton.jit
def is_drawn(record, best):
    """Whether the row has a temperature and, by its largest logit, a distribution."""
    return (float_word(record, TEMPERATURE) > 0.0) & (best > float("-inf")) & (best < float("inf"))


@triton.jit
def has_threshold(record):
    return (tl.load(record + TOP_K) > 0) | (float_word(record, TOP_P) < 1.0)


@triton.jit
def weight_scale(record):
    """log2(e) / temperature, of a row that has one."""
    return (1.0 / float_word(record, TEMPERATURE) * LOG2E).to(tl.float32)


@triton.jit
def weights(x, best, scale):
    """int64 weights of fp32 logits."""
    return (tl.exp2((x - best) * scale) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def open_row(logits, stride, records, histories, history_stride, edits, steps, n, V):
    """This program's row (axis 0 of the grid): what `adjusted` takes, the record first."""
    i = tl.program_id(0)
    record = records + tl.load(steps + i) * WORDS
    return record, logits + i.to(tl.int64) * stride, histories, history_stride, edits, tl.load(steps + n + i), V


@triton.jit
def adjusted(row, start, TILE: tl.constexpr, ADJUSTS: tl.constexpr):
    """fp32 logits start..start+TILE-1 of a row after penalties and edits; -inf past the end. TILE in whole EDIT_BLOCKs."""
    record, base, histories, history_stride, edits, position, V = row
    col = start + tl.arange(0, TILE)
    x = tl.load(base + col, mask=col < V, other=float("-inf")).to(tl.float32)
    if ADJUSTS:
        x = _penalise(x, col, record, histories, history_stride, V)
        x = _edit(x, col, start, record, edits, position, V, TILE)
    return x


@triton.jit
def _penalise(x, col, record, histories, history_stride, V):
    history = tl.load(record + HISTORY)
    if history >= 0:
        seen = tl.load(histories + history * history_stride + col, mask=col < V, other=0).to(tl.int32)
        times = seen & COUNT_MASK
        repetition = float_word(record, REPETITION).to(tl.float32)
        presence = float_word(record, PRESENCE).to(tl.float32)
        frequency = float_word(record, FREQUENCY).to(tl.float32)
        inverse = (1.0 / float_word(record, REPETITION)).to(tl.float32)
        x = tl.where(seen != 0, x * tl.where(x < 0.0, repetition, inverse), x)
        x = x - tl.where(times > 0, presence + frequency * times.to(tl.float32), 0.0)
    return x


@triton.jit
def _edit(x, col, start, record, edits, position, V, TILE: tl.constexpr):
    """Adds the row's biases and bans its ids, those that lie in this tile."""
    count = tl.load(record + EDIT_COUNT)
    if count > 0:
        mine = edits + tl.load(record + EDIT_START)
        bans = position < tl.load(record + MIN_TOKENS)
        end = tl.minimum((start + TILE) // EDIT_BLOCK, tl.cdiv(V, EDIT_BLOCK))
        first = tl.load(mine + count + start // EDIT_BLOCK)
        last = tl.load(mine + count + end)
        for i in range(first, last):
            edit = tl.load(mine + i)
            hit = col == (edit >> (BAN_BIT + 1)).to(tl.int32)
            bias = (edit & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
            banned = bans & (((edit >> BAN_BIT) & 1) != 0)
            x = tl.where(hit, tl.where(banned, float("-inf"), x + bias), x)
    return x


@triton.jit
def thread_sums(values, THREADS: tl.constexpr):
    """(THREADS,): sums of the neighbouring entries that each thread holds, without talking to others."""
    return tl.sum(tl.reshape(values, (THREADS, values.shape[0] // THREADS)), 1)
