"""Sampling = f(seed, sample index, position): the same request gives the same tokens wherever it runs.

Order: the grammar's mask, penalties, logit_bias and min_tokens -> greedy (the largest logit, lowest id first), or temperature
-> top-k -> top-p -> min-p -> inverse CDF, in vocabulary order, at one number drawn from a hash of (seed, sample index,
position). No generator state exists, so batching, migration and recomputation cannot change a draw. Semantics:
`kernels/sampling/reference.py`.
"""

from twinflow.engine.sampling.base import Draw, Drawn, RowMasks
from twinflow.engine.sampling.params import ending_ids
from twinflow.engine.sampling.sampler import Sampler

__all__ = ["Draw", "Drawn", "RowMasks", "Sampler", "ending_ids"]
