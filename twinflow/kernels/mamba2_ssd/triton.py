"""Mamba-2's selective state space on a GPU. Semantics: `reference.py`.

Sequences with one token run through `recurrent.py`; longer ones are prepared chunk by chunk in parallel (`prepare.py`) and
then scanned (`chunk_scan`): with a_i the running sum of the log decays d_t A in the chunk,

    Y = exp(a) C S^T + (exp(a_i - a_j) d_j c_i.b_j for j <= i) X + D X;   S <- exp(a_last) S + X^T diag(d exp(a_last - a)) B

(Dao & Gu 2024). Inputs in fp32 are there for exactness, which matrix units don't give: they run token by token.
"""

import torch

from twinflow.kernels.base import Snapshots
from twinflow.kernels.chunk_scan.triton import scan_chunks
from twinflow.kernels.mamba2_ssd.prepare import prepare_chunks
from twinflow.kernels.mamba2_ssd.recurrent import run_tokens


def mamba2_ssd(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: tuple[int, ...],
    snapshots: Snapshots | None = None,
    chunked: bool | None = None,
) -> torch.Tensor:
    """`chunked`: whether longer sequences run in chunks; None = where the inputs are of half precision."""
    for each in (x, b, c):
        if each.stride(2) != 1 or each.stride(1) != each.shape[2]:
            raise ValueError(f"heads must lie side by side, strides are {each.stride()}")
    if state.stride()[1:] != (x.shape[2] * b.shape[2], b.shape[2], 1):
        raise ValueError(f"a row of the state must be contiguous, strides are {state.stride()}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    chunked = x.dtype != torch.float32 if chunked is None else chunked
    longer = max(seq_lens, default=0) > 1
    where = (state, state_rows, fresh, cu_seqlens)
    if 1 in seq_lens or (longer and not chunked):
        run_tokens(x, b, c, dt, a_log, dt_bias, skip, out, *where, only_single=chunked, snapshots=snapshots)
    if longer and chunked:
        chunks = prepare_chunks(b, c, dt, a_log, dt_bias, cu_seqlens, len(seq_lens))
        scan_chunks(c, b, x, chunks, skip, out, *where, snapshots)
    return out
