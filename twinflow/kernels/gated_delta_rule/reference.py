"""Gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks") over packed sequences, in plain torch, fp32.

Per value head, with the state S (V, K), decay exp(g) and write strength beta:

    S <- exp(g_t) S;   S <- S + beta_t (v_t - S k_t) k_t^T;   o_t = S q_t

Sequences with one token take one batched step; longer ones the chunked form, 64 tokens at a time.
"""

import torch
import torch.nn.functional as F

from twinflow.kernels.base import Snapshots
from twinflow.kernels.causal_conv1d.reference import causal_conv1d
from twinflow.kernels.norms.reference import gated_rms_norm
from twinflow.kernels.rows import load_rows, store_rows
from twinflow.kernels.snapshots import pieces
from twinflow.kernels.varlen import single_indices, split_batch

CHUNK_TOKENS = 64


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay `g = -exp(a_log) * softplus(a + dt_bias)` (<= 0) and write strength `beta = sigmoid(b)`.

    a, b (T, Hv); a_log, dt_bias (Hv,). Returns g, beta (T, Hv) fp32.
    """
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g, torch.sigmoid(b.float())


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
) -> torch.Tensor:
    """`delta_gates`, then `gated_delta_rule`: what a layer calls, so that faster versions can do both at once.

    q, k, v may have any token stride, their heads side by side; cu_seqlens (B+1,) int32 repeats seq_lens on the device.
    """
    del cu_seqlens
    g, beta = delta_gates(a, b, a_log, dt_bias)
    return gated_delta_rule(q, k, v, g, beta, state, state_rows, fresh, seq_lens, l2norm_eps, snapshots)


def gated_delta_decode(
    mixed: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv: torch.Tensor,
    conv_state: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    norm_eps: float,
    l2norm_eps: float = 1e-6,
) -> torch.Tensor:
    """One token of each of B sequences from projection to projection: `causal_conv1d` over q|k|v, `gated_delta`, and
    `gated_rms_norm` by z.

    mixed (B, 2 * Hk * K + Hv * V), z (B, Hv * V), a, b (B, Hv), any row stride; conv (channels of mixed, W), conv_state (R,
    the same, W-1), norm (V,); the rest as in `gated_delta_rule`. Returns (B, Hv * V) in mixed.dtype.
    """
    sequences = z.shape[0]
    heads, v_dim, k_dim = state.shape[1:]
    lens = (1,) * sequences
    cu_seqlens = torch.arange(sequences + 1, dtype=torch.int32, device=mixed.device)
    mixed = causal_conv1d(mixed, conv, None, conv_state, state_rows, fresh, cu_seqlens, lens)
    keys = (mixed.shape[1] - heads * v_dim) // 2
    q, k, v = mixed.split([keys, keys, heads * v_dim], dim=-1)
    q, k, v = q.unflatten(1, (-1, k_dim)), k.unflatten(1, (-1, k_dim)), v.unflatten(1, (heads, v_dim))
    y = gated_delta(q, k, v, a, b, a_log, dt_bias, state, state_rows, fresh, cu_seqlens, lens, l2norm_eps)
    return gated_rms_norm(y, z.unflatten(1, (heads, v_dim)), norm, norm_eps).flatten(1)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
    fresh: torch.Tensor,
    seq_lens: tuple[int, ...],
    l2norm_eps: float = 1e-6,
    snapshots: Snapshots | None = None,
) -> torch.Tensor:
    """Runs the recurrence over B packed sequences, from and to their rows of `state`.

    q, k (T, Hk, K), l2-normalised here, q also scaled by K**-0.5; v (T, Hv, V), value head j reads key head
    j // (Hv / Hk); g (log decay), beta (T, Hv) fp32; state (R, Hv, V, K), updated in place; state_rows (B,) int64,
    -1 = start from zeros and store nothing; fresh (B,) bool, True = start from zeros; seq_lens: tokens per sequence;
    snapshots: more rows of `state` to write. Returns (T, Hv, V) in v.dtype.
    """
    q = _l2norm(q, l2norm_eps) * q.shape[-1] ** -0.5
    k = _l2norm(k, l2norm_eps)
    values = v.float()
    split = split_batch(seq_lens)
    if split.all_single and len(split.single) == len(seq_lens):
        s = load_rows(state, state_rows, fresh)
        out = _one_token(q, k, values, g, beta, s)
        store_rows(state, state_rows, s)
        return out.to(v.dtype)
    out = torch.empty_like(values)
    if split.single:
        seqs, at = single_indices(split, q.device)
        rows = state_rows[seqs]
        s = load_rows(state, rows, fresh[seqs])
        out[at] = _one_token(q[at], k[at], values[at], g[at], beta[at], s)
        store_rows(state, rows, s)
    for span in split.longer:
        one = slice(span.seq, span.seq + 1)
        s = load_rows(state, state_rows[one], fresh[one])[0]
        for t, rows in pieces(span, state_rows, snapshots):
            out[t], s = _chunked(q[t], k[t], values[t], g[t], beta[t], s)
            store_rows(state, rows, s.expand(len(rows), *s.shape))
    return out.to(v.dtype)


def _l2norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


def _one_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, s: torch.Tensor
) -> torch.Tensor:
    """One step for n sequences: q, k (n, Hk, K), v (n, Hv, V), s (n, Hv, V, K) changed in place. Returns (n, Hv, V).

    S k is computed as the row vector k^T S^T, which CPU libraries run several times faster in batches.
    """
    n, hv, v_dim, k_dim = s.shape
    repeat = hv // k.shape[1]
    key = k.repeat_interleave(repeat, 1).view(n * hv, 1, k_dim)
    query = q.repeat_interleave(repeat, 1).view(n * hv, 1, k_dim)
    flat = s.view(n * hv, v_dim, k_dim)
    by_column = flat.transpose(1, 2)
    flat.mul_(g.exp().reshape(n * hv, 1, 1))
    delta = (v.reshape(n * hv, 1, v_dim) - key @ by_column) * beta.reshape(n * hv, 1, 1)
    flat.addcmul_(delta.transpose(1, 2), key)
    return (query @ by_column).view(n, hv, v_dim)


def _chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence of n tokens in chunks: within a chunk the updates are solved at once (WY / UT form), between chunks
    only S is carried. q, k (n, Hk, K), v (n, Hv, V), g, beta (n, Hv), s (Hv, V, K). Returns (n, Hv, V) and the new s.

    With c_i the running sum of g in the chunk and D_ij = exp(c_i - c_j) for j <= i, the corrections W that the chunk
    writes obey (I + tril(beta_i D_ij k_i.k_j, -1)) W = beta (V - exp(c) K S^T); then
    O = exp(c) Q S^T + (D * Q K^T) W and S <- exp(c_last) S + W^T (exp(c_last - c) K).
    """
    n, repeat = v.shape[0], v.shape[1] // k.shape[1]
    size = min(n, CHUNK_TOKENS)
    q, k, v = (_to_chunks(x, size) for x in (q, k, v))  # (H, chunks, size, dim)
    g, beta = (_to_chunks(x[..., None], size) for x in (g, beta))  # (Hv, chunks, size, 1); padding: no decay, no write
    # Sums in fp64: after a token that forgets nearly all, small gaps are differences of large sums.
    decay = g.double().cumsum(2)
    gaps = (decay - decay.transpose(2, 3)).float()
    gaps = gaps.masked_fill_(_above_diagonal(size, v.device), float("-inf")).exp_()
    kk = (k @ k.transpose(2, 3)).repeat_interleave(repeat, 0)
    qk = (q @ k.transpose(2, 3)).repeat_interleave(repeat, 0)
    k, q = k.repeat_interleave(repeat, 0), q.repeat_interleave(repeat, 0)
    grown, rest = decay.exp().float(), (decay[:, :, -1:] - decay).exp().float()
    # The diagonal is taken as 1 and what is above it as 0 by the solver, so only the strict lower part matters.
    right = torch.cat([v * beta, k * (beta * grown)], dim=-1)
    solved = torch.linalg.solve_triangular(kk * gaps * beta, right, upper=False, unitriangular=True)
    from_values, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within, queries = qk * gaps, q * grown
    keys = k * rest
    out = torch.empty_like(v)
    for i in range(v.shape[1]):
        s_t = s.transpose(1, 2)
        written = torch.baddbmm(from_values[:, i], from_state[:, i], s_t, alpha=-1.0)
        out[:, i] = torch.baddbmm(queries[:, i] @ s_t, within[:, i], written)
        s = torch.baddbmm(s * grown[:, i, -1:], written.transpose(1, 2), keys[:, i])
    return out.flatten(1, 2)[:, :n].transpose(0, 1), s


def _to_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """(n, H, d) -> (H, chunks, size, d), zero-padded at the end."""
    n = x.shape[0]
    x = F.pad(x.transpose(0, 1), (0, 0, 0, -n % size))
    return x.reshape(x.shape[0], -1, size, x.shape[-1])


def _above_diagonal(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_(1)
