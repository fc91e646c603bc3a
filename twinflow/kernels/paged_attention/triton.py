"""Causal grouped-query attention over a paged KV cache on a GPU. Semantics: `reference.py`.

Sequences with one query go to `decode.py` (keys split over programs), longer ones to `prefill.py` (blocks of queries), which
read lengths of contexts on the device only; with `library`, very long ones go to `library.py` where the host knows the contexts.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from twinflow.kernels.paged_attention import library as libraries
from twinflow.kernels.paged_attention import prefill
from twinflow.kernels.paged_attention.decode import attend_one_query
from twinflow.kernels.paged_attention.library import Library
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
    library: Library | None = None,
) -> torch.Tensor:
    tokens, heads, dim = q.shape
    if q.stride(2) != 1 or q.stride(1) != dim:
        raise ValueError(f"heads must lie side by side, strides are {q.stride()}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(f"K and V must lie alike, strides are {k_cache.stride()} and {v_cache.stride()}")
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    single = seq_lens.count(1)
    if single:
        where = (k_cache, v_cache, block_tables, context_lens, cu_seqlens)
        attend_one_query(q, *where, scale, out, all_one=single == len(seq_lens), gate=gate, shared=shared)
    half = q.dtype.itemsize == 2
    for run in _runs(seq_lens, host_contexts, library is not None and half):
        mine = slice(run.start, run.start + sum(run.lens))
        own_gate = None if gate is None else gate[mine]
        if run.long:
            assert host_contexts is not None and library is not None
            table, context = block_tables[run.first], host_contexts[run.first]
            where = (k_cache, v_cache, table, context, scale)
            libraries.attend_long_queries(q[mine], *where, out[mine], own_gate, library)
            continue
        last = run.first + len(run.lens)
        starts = cu_seqlens[run.first : last + 1]
        if run.start:
            starts = starts - run.start
        where = (k_cache, v_cache, block_tables[run.first : last], context_lens[run.first : last], starts)
        longer = tuple(n for n in run.lens if n > 1)
        prefill.attend_many_queries(q[mine], *where, scale, out[mine], lens=longer, gate=own_gate)
    return out


class _Run(NamedTuple):
    """Neighbours in the batch, from sequence `first` and token `start` on, that one launch attends; `long`: one sequence, which
    the library takes."""

    first: int
    start: int
    lens: tuple[int, ...]
    long: bool


@lru_cache(maxsize=64)  # every layer asks for the same
def _runs(seq_lens: tuple[int, ...], contexts: tuple[int, ...] | None, library: bool) -> tuple[_Run, ...]:
    """Of the sequences with more than one query. Without contexts the lengths are those of a graph's capture, and each replay
    has its own, so one launch is ready for all of them."""
    if contexts is None:
        return (_Run(0, 0, seq_lens, False),) if any(n > 1 for n in seq_lens) else ()
    runs: list[_Run] = []
    start = 0
    for i, (n, context) in enumerate(zip(seq_lens, contexts, strict=True)):
        long = library and n >= libraries.LONG and context <= libraries.MOST_KEYS
        last = runs[-1] if runs else None
        if last and not (long or last.long) and n > 1 and last.first + len(last.lens) == i:
            runs[-1] = last._replace(lens=(*last.lens, n))
        elif n > 1:
            runs.append(_Run(i, start, (n,), long))
        start += n
    return tuple(runs)
