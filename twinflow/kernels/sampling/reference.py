"""Sampling in plain torch, row by row: the oracle, and what CPU runs on.

Order: repetition, presence and frequency penalties, edits (bias, banned ids) -> temperature 0: the largest, lowest id
first; else weights -> top-k -> top-p -> min-p -> inverse CDF over what is kept, in vocabulary order.

"Most likely first" means by adjusted logit, equal ones by ascending id. top-k keeps exactly the first k of that order; top-p
the shortest beginning of what top-k kept whose mass reaches top_p of it; min-p what weighs at least min_p of the heaviest.
"""

import math

import torch

from twinflow.kernels.sampling.tables import (
    BAN_BIT,
    BROKEN,
    COUNT_MASK,
    EDIT_COUNT,
    EDIT_START,
    FREQUENCY,
    HISTORY,
    MIN_P,
    MIN_TOKENS,
    NOTHING_LEFT,
    OK,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WEIGHT_BITS,
    Needs,
    RowTables,
)


def sample_tokens(logits: torch.Tensor, tables: RowTables, steps: torch.Tensor, needs: Needs) -> torch.Tensor:
    """One token per row of logits (n, V), any float dtype, the last dim contiguous.

    steps (3, n) int64: row of the tables (distinct), tokens generated before, 53 random bits. Returns (2, n) int64: token
    ids and outcomes (OK, BROKEN: NaN or +inf among the logits, NOTHING_LEFT: all are -inf); counts drawn tokens in
    `tables.histories`. `needs` must cover every row.
    """
    out = torch.zeros(2, logits.shape[0], dtype=torch.int64)
    for i, (row, position, bits) in enumerate(steps.T.tolist()):
        floats = tables.records[row].view(torch.float64).tolist()
        integers = tables.records[row].tolist()
        history = tables.histories[integers[HISTORY]] if integers[HISTORY] >= 0 else None
        x = _adjust(logits[i], floats, integers, history, tables.edits, position)
        token, outcome = _draw(x, floats, integers[TOP_K], bits)
        if history is not None and outcome == OK and int(history[token]) & COUNT_MASK < COUNT_MASK:
            history[token] += 1
        out[0, i], out[1, i] = token, outcome
    return out.to(logits.device)


def token_logprobs(
    logits: torch.Tensor, picks: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Natural logs under the raw logits (n, V) of rows `picks` (m,) int64, for their `tokens` (n,) int64 and the best `top`.

    Returns values (m, 1 + top) fp32, the token's own first, and ids (m, top) int64, the best first, equal ones by
    ascending id. A row with NaN or +inf gives whatever it gives.
    """
    x = logits.index_select(0, picks).float()
    logs = x.log_softmax(-1)
    ids = _best_first(x).topk(top, -1).values.bitwise_and(_LOW).neg().add(_LOW)
    chosen = torch.cat([tokens.index_select(0, picks)[:, None], ids], 1)
    return logs.gather(1, chosen), ids


_LOW = (1 << 31) - 1


def _best_first(x: torch.Tensor) -> torch.Tensor:
    """int64 keys that order fp32 x (m, V) as numbers, equal ones by descending id."""
    bits = x.add(0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ _LOW, bits).long()
    return keys << 31 | (_LOW - torch.arange(x.shape[-1], device=x.device))


def _adjust(
    logits: torch.Tensor,
    floats: list[float],
    integers: list[int],
    history: torch.Tensor | None,
    edits: torch.Tensor,
    position: int,
) -> torch.Tensor:
    """Penalties and edits on one row (V,), in fp32; a new tensor."""
    x = logits.to(torch.float32, copy=True)
    if history is not None:
        times = history.int() & COUNT_MASK
        scaled = torch.where(x < 0, x * floats[REPETITION], x * (1.0 / floats[REPETITION]))
        x = torch.where(history != 0, scaled, x)
        x -= torch.where(times > 0, floats[PRESENCE] + floats[FREQUENCY] * times, 0.0)
    if integers[EDIT_COUNT]:
        mine = edits[integers[EDIT_START] : integers[EDIT_START] + integers[EDIT_COUNT]]
        ids = mine >> (BAN_BIT + 1)
        x[ids] += mine.int().view(torch.float32)
        if position < integers[MIN_TOKENS]:
            x[ids[(mine >> BAN_BIT & 1).bool()]] = float("-inf")
    return x


def _draw(x: torch.Tensor, floats: list[float], top_k: int, bits: int) -> tuple[int, int]:
    """(token id, outcome) from adjusted logits (V,)."""
    best = float(x.max())
    if math.isnan(best) or best == math.inf:
        return 0, BROKEN
    if best == -math.inf:
        return 0, NOTHING_LEFT
    if floats[TEMPERATURE] == 0.0:
        return int(x.argmax()), OK  # the first of equal ones
    weights = ((x.double() - best) / floats[TEMPERATURE]).exp().mul(1 << WEIGHT_BITS).long()
    if top_k or floats[TOP_P] < 1.0:
        order = x.sort(descending=True, stable=True).indices
        weights[order[_count_kept(weights[order], top_k, floats[TOP_P]) :]] = 0
    weights[weights < int(floats[MIN_P] * (1 << WEIGHT_BITS))] = 0
    mass = weights.cumsum(0)
    total = int(mass[-1])
    target = min(int(bits * 2.0**-53 * total), total - 1)
    return int(torch.searchsorted(mass, target, right=True)), OK


def _count_kept(weights: torch.Tensor, top_k: int, top_p: float) -> int:
    """How many of weights (V,), the most likely first, top-k and then top-p keep: at least one."""
    kept = min(top_k or weights.numel(), weights.numel())
    mass = weights[:kept].cumsum(0)
    if top_p < 1.0:
        target = max(1, math.ceil(top_p * float(mass[-1])))
        kept = int((mass < target).sum()) + 1
    return kept
