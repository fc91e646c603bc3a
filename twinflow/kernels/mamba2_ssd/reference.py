"""Mamba-2's selective state space (Dao & Gu 2024, "Transformers are SSMs") over packed sequences, in plain torch, fp32.

Per head, with the state S (P, N), step d_t = softplus(dt_t + dt_bias) and the head's scalars A = -exp(a_log) and D:

    S <- exp(d_t A) S + d_t x_t b_t^T;   y_t = S c_t + D x_t

b and c are shared by the heads of a group. Sequences with one token take one batched step; longer ones the chunked (SSD)
form, 64 tokens at a time.
"""

import torch
import torch.nn.functional as F

from twinflow.kernels.base import Snapshots
from twinflow.kernels.rows import load_rows, store_rows
from twinflow.kernels.snapshots import pieces
from twinflow.kernels.varlen import single_indices, split_batch

CHUNK_TOKENS = 64


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
) -> torch.Tensor:
    """Runs the recurrence over B packed sequences, from and to their rows of `state`.

    x (T, H, P); b, c (T, G, N), head h reads group h // (H / G); dt (T, H), before bias and softplus; a_log, dt_bias,
    skip (D) (H,); state (R, H, P, N), updated in place; state_rows (B,) int64, -1 = start from zeros and store nothing;
    fresh (B,) bool, True = start from zeros; cu_seqlens (B+1,) int32 and seq_lens, the same on the host: tokens per
    sequence; snapshots: more rows of `state` to write. The step is not clamped: it may be anything in (0, inf). Returns
    (T, H, P) in x.dtype.
    """
    del cu_seqlens
    steps = F.softplus(dt.float() + dt_bias.float())
    g = steps * -a_log.float().exp()  # log decay, <= 0
    inputs, b, c = x.float(), b.float(), c.float()
    written = inputs * steps[..., None]
    split = split_batch(seq_lens)
    if split.all_single and len(split.single) == len(seq_lens):
        s = load_rows(state, state_rows, fresh)
        out = _one_token(written, b, c, g, s)
        store_rows(state, state_rows, s)
    else:
        out = torch.empty_like(inputs)
        if split.single:
            seqs, at = single_indices(split, x.device)
            rows = state_rows[seqs]
            s = load_rows(state, rows, fresh[seqs])
            out[at] = _one_token(written[at], b[at], c[at], g[at], s)
            store_rows(state, rows, s)
        for span in split.longer:
            one = slice(span.seq, span.seq + 1)
            s = load_rows(state, state_rows[one], fresh[one])[0]
            for t, rows in pieces(span, state_rows, snapshots):
                out[t], s = _chunked(written[t], b[t], c[t], g[t], s)
                store_rows(state, rows, s.expand(len(rows), *s.shape))
    return out.addcmul_(inputs, skip.float()[:, None]).to(x.dtype)


def _one_token(x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, g: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """One step for n sequences: x (n, H, P), already times the step, b, c (n, G, N), g (n, H), s (n, H, P, N) changed in
    place. Returns (n, H, P) without the skip."""
    n, heads, p_dim, n_dim = s.shape
    groups = b.shape[1]
    s *= g.exp()[..., None, None]
    by_group = s.view(n, groups, heads // groups * p_dim, n_dim)  # the heads of a group share b and c
    by_group.addcmul_(x.reshape(n, groups, -1, 1), b[:, :, None])
    # As a row vector: CPU libraries run c^T S^T several times faster in batches than S c.
    return (c[:, :, None] @ by_group.transpose(2, 3)).view(n, heads, p_dim)


def _chunked(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, g: torch.Tensor, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence of n tokens in chunks: within a chunk a masked matrix product, between chunks only S is carried.
    x (n, H, P), already times the step, b, c (n, G, N), g (n, H), s (H, P, N). Returns (n, H, P) without the skip and the
    new s.

    With a_i the running sum of g in the chunk, E_ij = exp(a_i - a_j) for j <= i and S the state before the chunk,
    Y = exp(a) C S^T + (E * C B^T) X and S <- exp(a_last) S + (exp(a_last - a) X)^T B.
    """
    n, heads, p_dim = x.shape
    groups, n_dim = b.shape[1:]
    r, size = heads // groups, min(n, CHUNK_TOKENS)
    x = _to_chunks(x.unflatten(1, (groups, r)), size)  # (G, chunks, r, size, P)
    g = _to_chunks(g.view(n, groups, r, 1), size)  # (G, chunks, r, size, 1); padding: no decay, no write
    b, c = (_to_chunks(v[:, :, None], size)[:, :, 0] for v in (b, c))  # (G, chunks, size, N)
    # Sums in fp64: after a token that forgets nearly all, small gaps are differences of large sums.
    decay = g.double().cumsum(3)
    gaps = (decay - decay.transpose(3, 4)).float()
    gaps = gaps.masked_fill_(_above_diagonal(size, x.device), float("-inf")).exp_()
    grown, rest = decay.exp().float(), (decay[:, :, :, -1:] - decay).exp().float()
    within = (c @ b.transpose(2, 3))[:, :, None] * gaps @ x  # (G, chunks, r, size, P)
    added = (x * rest).transpose(3, 4).flatten(2, 3) @ b  # (G, chunks, r * P, N)
    kept = grown[:, :, :, -1].repeat_interleave(p_dim, 2)  # (G, chunks, r * P, 1)
    s = s.view(groups, r * p_dim, n_dim)
    before = torch.empty_like(added)
    for i in range(added.shape[1]):
        before[:, i] = s
        s = torch.addcmul(added[:, i], s, kept[:, i])
    carried = (c @ before.transpose(2, 3)).unflatten(3, (r, p_dim)).transpose(2, 3)  # (G, chunks, r, size, P)
    y = within.addcmul_(carried, grown)
    y = y.permute(1, 3, 0, 2, 4).reshape(-1, heads, p_dim)[:n]
    return y, s.view(heads, p_dim, n_dim)


def _to_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """(n, G, r, d) -> (G, chunks, r, size, d), zero-padded at the end."""
    n = x.shape[0]
    x = F.pad(x.permute(1, 2, 0, 3), (0, 0, 0, -n % size))  # (G, r, chunks * size, d)
    return x.unflatten(2, (-1, size)).transpose(1, 2).contiguous()


def _above_diagonal(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_(1)
