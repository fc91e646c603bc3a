"""One row at a time with torch operations; each token is waited for."""

from collections import Counter
from collections.abc import Sequence

import torch

from twinflow.contracts.requests import SamplingParams, TokenLogprobs
from twinflow.engine.sampling.params import ending_ids, uniform


def adjust(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> torch.Tensor:
    """Penalties, bias and `min_tokens` on one row (vocab,); returns a new row when anything applies.

    Repetition as in Hugging Face (over prompt and generated), presence and frequency as in OpenAI (over generated).
    """
    row = logits
    if params.repetition_penalty != 1.0 and (prompt or generated):
        seen = torch.tensor(sorted({*prompt, *generated}), device=row.device)
        row = row.clone()
        score = row[seen]
        row[seen] = torch.where(score < 0, score * params.repetition_penalty, score / params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and generated:
        counts = Counter(generated)
        ids = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row = row.index_add(0, ids, -(params.presence_penalty + params.frequency_penalty * times))
    if params.logit_bias:
        ids = torch.tensor([i for i, _ in params.logit_bias], device=row.device)
        bias = torch.tensor([b for _, b in params.logit_bias], dtype=row.dtype, device=row.device)
        row = row.index_add(0, ids, bias)
    banned = ending_ids(params)
    if len(generated) < params.min_tokens and banned:
        row = row.index_fill(0, torch.tensor(banned, device=row.device), float("-inf"))
    return row


def draw(row: torch.Tensor, params: SamplingParams, position: int) -> int:
    """One token id from adjusted logits (vocab,). `position` = number of tokens generated before it."""
    if params.temperature == 0.0:
        return int(row.argmax())
    values, ids = (row.double() / params.temperature).sort(descending=True, stable=True)
    keep = values.numel() if params.top_k <= 0 else min(params.top_k, values.numel())
    probs = values[:keep].softmax(0)
    if params.top_p < 1.0:
        # the smallest set whose mass reaches top_p: a token stays if the mass before it is still below
        probs = probs[(probs.cumsum(0) - probs) < params.top_p]
    if params.min_p > 0.0:
        probs = probs[probs >= params.min_p * probs[0]]
    mass = probs.cumsum(0)
    target = uniform(params.seed, params.sample_index, position) * float(mass[-1])
    return int(ids[min(int(torch.searchsorted(mass, target, right=True)), probs.numel() - 1)])


def token_logprobs(logits: torch.Tensor, token_id: int, top: int) -> TokenLogprobs:
    """Natural logs under the raw logits (vocab,), before penalties, temperature and filters."""
    logs = logits.float().log_softmax(-1)
    best: tuple[tuple[int, float], ...] = ()
    if top:
        values, ids = logs.topk(min(top, logs.numel()))
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logs[token_id]), best)
