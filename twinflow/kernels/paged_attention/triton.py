"""Causal grouped-query attention over a paged KV cache on a GPU. Semantics: `reference.py`.

Sequences with one query go to `decode.py` (keys split over programs), longer ones to `prefill.py` (blocks of queries), which
read lengths of contexts on the device only; with `library`, very long ones go to `cudnn.py` where the host knows the contexts.
"""

from functools import lru_cache
from itertools import accumulate

import torch

from twinflow.kernels.paged_attention import cudnn, prefill
from twinflow.kernels.paged_attention.decode import attend_one_query
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
    library: bool = False,
) -> torch.Tensor:
    tokens, heads, dim = q.shape
    if q.stride(2) != 1 or q.stride(1) != dim:
        raise ValueError(f"heads must lie side by side, strides are {q.stride()}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(f"K and V must lie alike, strides are {k_cache.stride()} and {v_cache.stride()}")
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    most = prefill.MOST_QUERIES
    if library and host_contexts is not None and q.dtype.itemsize == 2:
        most = cudnn.LONG - 1
        for i, start in _long(seq_lens):
            mine = slice(start, start + seq_lens[i])
            own_gate = None if gate is None else gate[mine]
            cudnn.attend_long_queries(
                q[mine], k_cache, v_cache, block_tables[i], host_contexts[i], scale, out[mine], own_gate
            )
    single, longer = _split(seq_lens, most)
    where = (k_cache, v_cache, block_tables, context_lens, cu_seqlens)
    if single:
        attend_one_query(q, *where, scale, out, all_one=single == len(seq_lens), gate=gate, shared=shared)
    if longer:
        prefill.attend_many_queries(q, *where, scale, out, lens=longer, most=most, gate=gate)
    return out


@lru_cache(maxsize=64)  # every layer asks for the same
def _split(seq_lens: tuple[int, ...], most: int) -> tuple[int, tuple[int, ...]]:
    """How many sequences have one query, and the lengths of those that have more, up to `most`."""
    return seq_lens.count(1), tuple(n for n in seq_lens if 1 < n <= most)


@lru_cache(maxsize=64)
def _long(seq_lens: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The sequences with so many queries that the library takes them: their place in the batch, and that of their first
    query."""
    starts = accumulate(seq_lens, initial=0)
    return tuple((i, start) for i, (n, start) in enumerate(zip(seq_lens, starts, strict=False)) if n >= cudnn.LONG)
