"""Rows with every option, as tables, beside a plain definition of what each draws."""

import math
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from twinflow.contracts.requests import SamplingParams
from twinflow.engine.sampling.memory import RowMemory
from twinflow.engine.sampling.params import ending_ids, needs_threshold
from twinflow.kernels.sampling.tables import Needs, RowTables

GREEDY = SamplingParams(max_tokens=99, seed=0, temperature=0.0)
FREE = replace(GREEDY, temperature=1.0)
BITS = 1 << 53  # random numbers are integers below this


@dataclass(frozen=True)
class Row:
    params: SamplingParams
    bits: int = 0  # the random number
    position: int = 0
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()


def tables_of(rows: Sequence[Row], vocab: int) -> tuple[RowTables, torch.Tensor, Needs]:
    """Arguments of `sample_tokens` besides the logits: tables of twice as many rows, those in use in a scattered order."""
    memory = RowMemory(vocab, 2 * len(rows), "cpu")
    places = random.Random(len(rows)).sample(range(2 * len(rows)), len(rows))
    for place, row in zip(places, rows, strict=True):
        memory.put(place, row.params, struct.pack(f"<{len(row.prompt)}I", *row.prompt), row.generated)
    steps = torch.tensor([places, [r.position for r in rows], [r.bits for r in rows]])
    draws = any(row.params.temperature > 0 for row in rows)
    adjusts = any(memory.adjusts(place) for place in places)
    return memory.tables, steps, Needs(draws, any(needs_threshold(row.params) for row in rows), adjusts)


def on(device: str, tables: RowTables) -> RowTables:
    """A copy."""
    return RowTables(*(t.to(device, copy=True) for t in (tables.records, tables.histories, tables.edits)))


def random_row(vocab: int, choose: random.Random) -> Row:
    """One with a random choice of options, each off as often as on."""
    params = SamplingParams(
        max_tokens=99,
        seed=0,
        temperature=choose.choice([0.0, 0.3, 0.8, 1.0, 1.5]),
        top_k=choose.choice([0, 0, 1, 5, vocab // 3, vocab + 5]),
        top_p=choose.choice([1.0, 1.0, 0.9, 0.5, 0.99, 1e-6]),
        min_p=choose.choice([0.0, 0.0, 0.05, 1.0]),
        repetition_penalty=choose.choice([1.0, 1.3, 0.8]),
        presence_penalty=choose.choice([0.0, 0.5, -0.5]),
        frequency_penalty=choose.choice([0.0, 0.2]),
        logit_bias=tuple((choose.randrange(vocab), choose.uniform(-3, 3)) for _ in range(choose.choice([0, 3, 200]))),
        min_tokens=choose.choice([0, 4]),
        eos_token_ids=(choose.randrange(vocab),),
        stop_token_ids=(choose.randrange(vocab),),
    )
    prompt = tuple(choose.randrange(vocab) for _ in range(20))
    generated = tuple(choose.randrange(vocab) for _ in range(choose.choice([0, 30])))
    return Row(params, choose.randrange(BITS), choose.randrange(8), prompt, generated)


def plain_adjust(logits: Sequence[float], row: Row) -> list[float]:
    """Penalties, bias and banned ids, one token at a time, in fp32."""
    params, one = row.params, np.float32
    out = []
    bias: dict[int, float] = {}
    for token, value in params.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    for token, logit in enumerate(logits):
        x, times = one(logit), row.generated.count(token)
        if token in row.prompt or times:
            factor = one(params.repetition_penalty)
            x *= factor if x < 0 else one(1.0 / params.repetition_penalty)
        if times:
            x -= one(params.presence_penalty) + one(params.frequency_penalty) * one(times)
        x += one(bias.get(token, 0.0))
        if row.position < params.min_tokens and token in ending_ids(params):
            x = one(-np.inf)
        out.append(float(x))
    return out


def plain_draw(x: Sequence[float], row: Row) -> tuple[int, float]:
    """(token, margin) from adjusted logits by sorting: `margin` = how close a decision was, as a share of the mass."""
    params = row.params
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.temperature == 0.0:
        return order[0], 1.0
    mass = [math.exp((value - x[order[0]]) / params.temperature) for value in x]
    margin = 1.0
    kept = order[: params.top_k or len(order)]
    if params.top_p < 1.0:
        total = sum(mass[i] for i in kept)
        reached, enough = 0.0, []
        for i in kept:
            enough.append(i)
            reached += mass[i]
            margin = min(margin, abs(reached / total - params.top_p))
            if reached >= params.top_p * total:
                break
        kept = enough
    if params.min_p > 0.0:
        margin = min(margin, *(abs(mass[i] - params.min_p) for i in kept if i != order[0]), 1.0)
        kept = [i for i in kept if mass[i] >= params.min_p]
    total, reached = sum(mass[i] for i in kept), 0.0
    target = row.bits / BITS
    for i in sorted(kept):
        reached += mass[i]
        margin = min(margin, abs(reached / total - target))
        if reached > target * total:
            return i, margin
    return max(kept), 0.0
