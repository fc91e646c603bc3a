"""What the sampling kernels read besides logits: a record per row of the engine's tables, histories, edits.

Probabilities are integers: a token's weight is trunc(exp((x - largest x) / temperature) * 2**42). Sums of integers do not
depend on their order, so a row's result is the same however it is split and whatever else is in the batch.
"""

from dataclasses import dataclass

import torch

WORDS = 16  # per record: float64 bits, then integers
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
TOP_K, MIN_TOKENS, HISTORY, EDIT_START, EDIT_COUNT = range(6, 11)

WEIGHT_BITS = 42
MAX_VOCAB = 1 << 20  # weights of a row must sum to less than 2**63

PROMPT_MARK = -(1 << 15)  # the sign bit of a history entry; the other 15 bits count generated tokens, saturating
COUNT_MASK = (1 << 15) - 1

BAN_BIT = 32  # of an edit: id << 33 | banned until min_tokens << 32 | fp32 bits of the bias
EDIT_BLOCK = 1024  # ids

OK, BROKEN, NOTHING_LEFT = range(3)  # outcome of a row; a token that is not OK reads 0


@dataclass(frozen=True, slots=True)
class RowTables:
    """Lives on the kernels' device and is updated between launches on their stream.

    `records` (R, WORDS) int64; TOP_K 0 = off, HISTORY = row of `histories` or -1, EDIT_START and EDIT_COUNT = a span of
    `edits`. `histories` (H, V) int16, any row stride: see PROMPT_MARK; drawn tokens are counted by the kernels. `edits`
    (E,) int64: a span holds its edits, one per token id, ascending, and behind them, for each EDIT_BLOCK of ids and for the
    end, how many edits lie before it.
    """

    records: torch.Tensor
    histories: torch.Tensor
    edits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Needs:
    """What some row of a batch asks for; lets a launch leave out passes that no row needs."""

    draws: bool  # a temperature above 0
    thresholds: bool  # top-k or top-p
    adjusts: bool  # a history or edits
