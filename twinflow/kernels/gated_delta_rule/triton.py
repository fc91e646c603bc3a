"""Gated delta rule on a GPU. Semantics: `reference.py`.

Sequences with one token run through `recurrent.py`; longer ones are prepared chunk by chunk in parallel (`prepare.py`) and
then scanned (`chunk_scan`; products are left running where the GPU and the shapes allow it). Inputs in fp32 are there for
exactness, which matrix units don't give: they run token by token.
"""

import torch

from twinflow.kernels.base import Snapshots
from twinflow.kernels.chunk_scan.triton import Chunks, scan_chunks
from twinflow.kernels.gated_delta_rule.prepare import prepare_chunks
from twinflow.kernels.gated_delta_rule.recurrent import run_tokens
from twinflow.kernels.triton_tools import runs_gluon


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: tuple[int, ...],
    l2norm_eps: float = 1e-6,
    snapshots: Snapshots | None = None,
    chunked: bool | None = None,
) -> torch.Tensor:
    """`chunked`: whether longer sequences run in chunks; None = where the inputs are of half precision."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for x in (q, k, v):
        if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            raise ValueError(f"heads must lie side by side, strides are {x.stride()}")
    if state.stride()[1:] != (v.shape[2] * k.shape[2], k.shape[2], 1):
        raise ValueError(f"a row of the state must be contiguous, strides are {state.stride()}")
    chunked = q.dtype != torch.float32 if chunked is None else chunked
    longer = max(seq_lens, default=0) > 1
    where = (state, state_rows, fresh, cu_seqlens)
    if 1 in seq_lens or (longer and not chunked):
        run_tokens(q, k, v, a, b, a_log, dt_bias, out, *where, l2norm_eps, only_single=chunked, snapshots=snapshots)
    if longer and chunked:
        chunks = prepare_chunks(q, k, a, b, a_log, dt_bias, cu_seqlens, len(seq_lens), l2norm_eps)
        if not (runs_gluon(q.device) and _scanned_on_hopper(q, k, v, chunks, out, where, snapshots)):
            scan_chunks(q, k, v, chunks, None, out, *where, snapshots)
    return out


def _scanned_on_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunks: Chunks,
    out: torch.Tensor,
    where: tuple[torch.Tensor, ...],
    snapshots: Snapshots | None,
) -> bool:
    """Whether it was; not where the shapes are others than that scan is written for."""
    from twinflow.kernels.chunk_scan import hopper  # other releases of Triton may not have what it imports

    if not hopper.suits(q, k, v):
        return False
    state, state_rows, fresh, cu_seqlens = where
    hopper.scan_corrected_chunks(q, k, v, chunks, out, state, state_rows, fresh, cu_seqlens, snapshots)
    return True
