"""Causal grouped-query attention over a paged KV cache, in plain torch, fp32 inside.

Only the first `context_lens` keys of a sequence exist. What lies beyond in its last block may be uninitialised memory,
so it is neither scored nor read as a value: NaN there never reaches an output.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from twinflow.kernels.gating.reference import sigmoid_gate
from twinflow.kernels.paged_attention.shared import SharedPrefixes
from twinflow.kernels.varlen import Span, single_indices, split_batch


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_slots: torch.Tensor
) -> None:
    """Stores keys and values of new tokens into their blocks, in place.

    k, v (T, Hkv, D); caches (blocks, Hkv, block_tokens, D), any strides; kv_slots (T,) int64: block * block_tokens +
    offset, distinct, -1 = not written. Synchronises with the host on CUDA (a boolean selection).
    """
    keep = kv_slots >= 0
    if not bool(keep.all()):
        kv_slots, k, v = kv_slots[keep], k[keep], v[keep]
    block_tokens = k_cache.shape[2]
    block, offset = kv_slots // block_tokens, kv_slots % block_tokens
    k_cache[block, :, offset] = k.to(k_cache.dtype)
    v_cache[block, :, offset] = v.to(v_cache.dtype)


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
    """Attends each query to the keys of its sequence up to and including itself; keys must be written before.

    q (T, H, D), query head h reads kv head h // (H / Hkv); caches (blocks, Hkv, block_tokens, D); block_tables
    (B, max_blocks) int32, -1 = no block; context_lens (B,) int32, readable tokens including this batch's, 0 for padding
    rows; seq_lens: queries per sequence, the last of which sits at position context_len - 1; cu_seqlens (B+1,) int32, the
    same on the device. gate (T, H * D): the result is multiplied by its sigmoid. shared: prefixes of the sequences with one
    query; it changes no result and is not used here. host_contexts: context_lens on the host, where the caller knows them;
    else they are read back. Rows without readable keys give 0. Returns (T, H, D) in q.dtype.
    """
    del cu_seqlens, shared
    contexts = context_lens.tolist() if host_contexts is None else host_contexts
    out = _attend(q, k_cache, v_cache, block_tables, context_lens, contexts, seq_lens, scale)
    return out if gate is None else sigmoid_gate(out, gate.view(out.shape))


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    contexts: Sequence[int],
    seq_lens: tuple[int, ...],
    scale: float,
) -> torch.Tensor:
    split = split_batch(seq_lens)
    if len(split.single) == len(seq_lens):
        return _one_query(q, k_cache, v_cache, block_tables, context_lens, max(contexts, default=0), scale).to(q.dtype)
    out = torch.zeros_like(q)
    if split.single:
        seqs, at = single_indices(split, q.device)
        longest = max(contexts[s.seq] for s in split.single)
        lens = context_lens[seqs]
        out[at] = _one_query(q[at], k_cache, v_cache, block_tables[seqs], lens, longest, scale).to(q.dtype)
    for span in split.longer:
        if contexts[span.seq] == 0:
            continue
        piece = q[span.start : span.end]
        out[span.start : span.end] = _many_queries(
            piece, k_cache, v_cache, block_tables[span.seq], span, contexts[span.seq], scale
        )
    return out


def _one_query(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    context_lens: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    """Decode: n sequences with one query each, padded to the longest context. q (n, H, D); returns it in fp32.

    Works block by block, so that keys and values are copied once and not rearranged.
    """
    n, heads, dim = q.shape
    kv_heads, block_tokens = k_cache.shape[1], k_cache.shape[2]
    tables = tables[:, : max(1, -(-longest // block_tokens))]
    m = tables.shape[1]
    keys, values = _gather(k_cache, tables), _gather(v_cache, tables)  # (n, m, Hkv, block_tokens, D)
    positions = torch.arange(m * block_tokens, device=q.device).view(m, block_tokens)
    hidden = (positions >= context_lens.view(n, 1, 1)) | (tables < 0).unsqueeze(2)  # (n, m, block_tokens)
    values.transpose(2, 3)[hidden] = 0.0
    grouped = q.float().view(n, 1, kv_heads, heads // kv_heads, dim) * scale
    scores = grouped @ keys.transpose(3, 4)  # (n, m, Hkv, r, block_tokens)
    scores.masked_fill_(hidden[:, :, None, None], torch.finfo(torch.float32).min)
    weights = scores.permute(0, 2, 3, 1, 4).flatten(3).softmax(-1)  # over all keys: (n, Hkv, r, m * block_tokens)
    weights = weights.unflatten(3, (m, block_tokens)).permute(0, 3, 1, 2, 4)
    return (weights @ values).sum(1).view(n, heads, dim)


def _many_queries(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    span: Span,
    context: int,
    scale: float,
) -> torch.Tensor:
    """Prefill chunk of one sequence at the end of `context` tokens. q (n, H, D); returns it in q.dtype."""
    block_tokens = k_cache.shape[2]
    table = table[None, : -(-context // block_tokens)]
    keys, values = (_gather(c, table).transpose(1, 2).flatten(2, 3)[:, :, :context] for c in (k_cache, v_cache))
    queries = q.float().transpose(0, 1)[None]  # (1, H, n, D)
    causal = span.tokens == context
    mask = None
    if not causal:
        positions = torch.arange(context - span.tokens, context, device=q.device)
        mask = torch.arange(context, device=q.device) <= positions[:, None]
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).to(q.dtype)


def _gather(cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Copies blocks: tables (n, m) -> (n, m, Hkv, block_tokens, D) fp32; block -1 reads block 0 and must be masked."""
    picked = cache.index_select(0, tables.flatten().clamp(min=0))
    return picked.view(*tables.shape, *picked.shape[1:]).float()
