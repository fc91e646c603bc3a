"""Device functions of the sampling kernels: a tile of a row's adjusted logits, keys that order them, integer weights."""

import triton
import triton.language as tl

from twinflow.kernels.sampling import tables as of

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
WEIGHT_ONE = tl.constexpr(float(1 << of.WEIGHT_BITS))

LOW_BITS = tl.constexpr((1 << 31) - 1)
NO_KEY = tl.constexpr(-(1 << 31))  # below every key: entries past the vocabulary
LEAST_KEY = tl.constexpr(-(1 << 31) + (1 << 23) - 1)  # of -inf
LOG2E = tl.constexpr(1.4426950408889634)

# Words of a row's scratch record, (n, SCRATCH) int64, zero before the first kernel.
SCRATCH = tl.constexpr(48)
BEST, SUM, SQUARES, COUNT, FILLED, THRESHOLD, QUOTA = (tl.constexpr(i) for i in range(7))
MASSES, COUNTS = tl.constexpr(8), tl.constexpr(24)
PIVOTS = tl.constexpr(16)


@triton.jit
def float_word(record, WORD: tl.constexpr):
    return tl.load(record + WORD).to(tl.float64, bitcast=True)


@triton.jit
def order_key(x):
    """int32 keys that order fp32 as numbers; there is no -0.0 and no NaN in `adjusted`."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ LOW_BITS, bits)


@triton.jit
def key_value(key):
    """The fp32 of an int32 key."""
    return tl.where(key < 0, key ^ LOW_BITS, key).to(tl.float32, bitcast=True)


@triton.jit
def best_value(best):
    """The largest logit of a row from its packed BEST word: the key in the upper bits, LOW_BITS - id below."""
    return key_value(((best >> 31) - (1 << 31)).to(tl.int32))


@triton.jit
def is_drawable(value):
    """Whether a row whose largest logit is `value` has a distribution."""
    return (value > float("-inf")) & (value < float("inf"))


@triton.jit
def weight_scale(record):
    """log2(e) / temperature, of a row that has one."""
    return (1.0 / float_word(record, TEMPERATURE) * LOG2E).to(tl.float32)


@triton.jit
def weights(x, best, scale):
    """int64 weights of fp32 logits."""
    return (tl.exp2((x - best) * scale) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def adjusted(base, record, histories, history_stride, edits, position, start, V, TILE: tl.constexpr):
    """fp32 logits start..start+TILE-1 of the row at `base` after penalties and edits; NaN reads +inf, past the end -inf."""
    col = start + tl.arange(0, TILE)
    live = col < V
    x = tl.load(base + col, mask=live, other=float("-inf")).to(tl.float32)
    history = tl.load(record + HISTORY)
    if history >= 0:
        seen = tl.load(histories + history * history_stride + col, mask=live, other=0).to(tl.int32)
        times = seen & COUNT_MASK
        repetition = float_word(record, REPETITION).to(tl.float32)
        presence = float_word(record, PRESENCE).to(tl.float32)
        frequency = float_word(record, FREQUENCY).to(tl.float32)
        x = tl.where(seen != 0, tl.where(x < 0.0, x * repetition, tl.math.div_rn(x, repetition)), x)
        x = x - tl.where(times > 0, presence + frequency * times.to(tl.float32), 0.0)
    count = tl.load(record + EDIT_COUNT).to(tl.int32)
    if count > 0:
        mine = edits + tl.load(record + EDIT_START)
        bans = position < tl.load(record + MIN_TOKENS)
        first, last = edits_between(mine, count, start, start + TILE)
        for i in range(first, last):
            edit = tl.load(mine + i)
            hit = col == (edit >> (BAN_BIT + 1)).to(tl.int32)
            bias = (edit & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
            banned = bans & (((edit >> BAN_BIT) & 1) != 0)
            x = tl.where(hit, tl.where(banned, float("-inf"), x + bias), x)
    x = tl.where(x != x, float("inf"), x)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def edits_between(mine, count, start, end):
    """The span of a row's edits whose ids lie in start..end-1."""
    first = 0
    last = 0
    for at in range(0, count, 128):
        index = at + tl.arange(0, 128)
        ids = tl.load(mine + index, mask=index < count, other=(1 << 62)) >> (BAN_BIT + 1)
        first += tl.sum((ids < start).to(tl.int32))
        last += tl.sum((ids < end).to(tl.int32))
    return first, last


@triton.jit
def live_keys(x, start, V, TILE: tl.constexpr):
    """Keys of a tile; NO_KEY past the vocabulary."""
    return tl.where(start + tl.arange(0, TILE) < V, order_key(x), NO_KEY)
