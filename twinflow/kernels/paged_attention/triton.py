"""Causal grouped-query attention over a paged KV cache on a GPU. Semantics: `reference.py`.

Sequences with one query go to `decode.py` (keys split over programs), longer ones to `prefill.py` (blocks of queries).
Lengths of contexts are read on the device only.
"""

from functools import lru_cache

import torch

from twinflow.kernels.paged_attention.decode import attend_one_query
from twinflow.kernels.paged_attention.prefill import attend_many_queries
from twinflow.kernels.paged_attention.shared import SharedPrefixes


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: tuple[int, ...],
    scale: float,
    gate: torch.Tensor | None = None,
    shared: SharedPrefixes | None = None,
    host_contexts: tuple[int, ...] | None = None,
) -> torch.Tensor:
    tokens, heads, dim = q.shape
    if q.stride(2) != 1 or q.stride(1) != dim:
        raise ValueError(f"heads must lie side by side, strides are {q.stride()}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(f"K and V must lie alike, strides are {k_cache.stride()} and {v_cache.stride()}")
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    single, longer = _split(seq_lens)
    where = (k_cache, v_cache, block_tables, context_lens, cu_seqlens)
    if single:
        attend_one_query(q, *where, scale, out, all_one=single == len(seq_lens), gate=gate, shared=shared)
    if longer:
        attend_many_queries(q, *where, scale, out, lens=longer, gate=gate)
    return out


@lru_cache(maxsize=64)  # every layer asks for the same
def _split(seq_lens: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """How many sequences have one query, and the lengths of those that have more."""
    return seq_lens.count(1), tuple(n for n in seq_lens if n > 1)
