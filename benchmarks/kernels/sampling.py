# ruff: noqa: B023 (each closure runs before the loop goes on)
"""One token per row of logits, by option: the floor is one read of the logits."""

import struct
from dataclasses import replace

import torch

from benchmarks.kernels.shapes import bf16
from benchmarks.kernels.timing import Bench
from twinflow.contracts.requests import SamplingParams
from twinflow.engine.sampling.memory import RowMemory
from twinflow.engine.sampling.params import needs_threshold
from twinflow.kernels.sampling.tables import Needs, RowTables
from twinflow.kernels.sampling.triton import sample_tokens, token_logprobs

VOCAB = 151_936
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
DRAWN = replace(GREEDY, temperature=0.8)
PENALISED = replace(
    DRAWN,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    logit_bias=tuple((i * 500, 1.0) for i in range(50)),
    min_tokens=9,
    eos_token_ids=(7,),
)
OPTIONS = {
    "greedy": GREEDY,
    "temperature": DRAWN,
    "min-p": replace(DRAWN, min_p=0.05),
    "top-k 50": replace(DRAWN, top_k=50),
    "top-p 0.9": replace(DRAWN, top_p=0.9),
    "top-k 50, top-p 0.9": replace(DRAWN, top_k=50, top_p=0.9),
    "greedy, penalties": replace(PENALISED, temperature=0.0),
    "top-p 0.9, penalties": replace(PENALISED, top_p=0.9),
    "all options": replace(PENALISED, top_k=50, top_p=0.9, min_p=0.01),
}


def tables_of(params: SamplingParams, rows: int) -> tuple[RowTables, torch.Tensor, Needs]:
    """Arguments of `sample_tokens` besides logits: every row asks for the same, with random numbers of its own."""
    memory = RowMemory(VOCAB, rows, "cuda")
    for row in range(rows):
        memory.put(row, params, struct.pack("<200I", *range(100, 300)), range(500, 600))
    bits = torch.arange(rows) * ((1 << 53) // rows)
    steps = torch.stack([torch.arange(rows), torch.full((rows,), 5), bits]).cuda()
    return memory.tables, steps, Needs(params.temperature > 0, needs_threshold(params), memory.adjusts(0))


def sampling(bench: Bench) -> None:
    """Logits of spread 3 are like a model's, those of spread 1 so flat that top-p keeps a third of the vocabulary."""
    for rows in (1, 32, 256):
        for spread in (3, 1):
            logits = bf16(rows, VOCAB) * spread
            for name, params in OPTIONS.items():
                tables, steps, needs = tables_of(params, rows)
                bench.add(
                    f"sample: {name}",
                    f"B={rows}, spread {spread}",
                    lambda: sample_tokens(logits, tables, steps, needs),
                    logits.nbytes,
                )
        picks = torch.arange(rows, device="cuda")
        bench.add(
            "log-probabilities, top 20", f"B={rows}", lambda: token_logprobs(logits, picks, picks, 20), logits.nbytes
        )
