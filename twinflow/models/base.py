"""What the engine asks of a model: a layout, and a forward pass over a packed batch that updates the cache in place.

A family (`families/`) turns a Hugging Face config into layers, group specs and a weight mapping; after that nothing
branches on the kind of model.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from twinflow.cache.arena import Arena
from twinflow.contracts.groups import CacheLayout
from twinflow.kernels.base import KernelSet, Snapshots
from twinflow.kernels.paged_attention.shared import SharedPrefixes


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A packed (varlen) batch of B sequences and T tokens; prefill chunks and decode tokens look the same.

    Rows with `state_rows` -1 or `kv_slots` -1 are padding / not written, never an index.
    """

    input_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64, absolute; consecutive within a sequence
    cu_seqlens: torch.Tensor  # (B+1,) int32, prefix sums of tokens per sequence in this batch
    seq_lens: tuple[int, ...]  # the same on the host: tokens of each sequence in this batch
    context_lens: torch.Tensor  # (B,) int32: tokens whose KV is readable after this chunk = start position + seq_len
    block_tables: torch.Tensor  # (B, max_blocks) int32 block numbers, -1 beyond the end
    kv_slots: torch.Tensor  # (T,) int64: block * block_tokens + offset to write this token's K/V to, -1 = already there
    state_rows: torch.Tensor  # (B,) int64: row of the sequence's own slot; read (if start > 0) and updated in place
    fresh: torch.Tensor  # (B,) bool: True = start from the zero state (start position 0), ignore what the slot holds
    logit_rows: torch.Tensor  # (R,) int64: which of the T tokens need logits
    # Optional, for versions that can do better with them:
    host_contexts: tuple[int, ...] | None = None  # context_lens on the host, where known: inside a CUDA graph it is not
    snapshots: Snapshots | None = None  # states to keep from amid the chunks of this batch
    shared: SharedPrefixes | None = None  # blocks that several one-token sequences of the batch hold, where grouped


class HybridModel(Protocol):
    """A loaded model. Not thread-safe: one engine loop calls it."""

    layout: CacheLayout
    kernels: KernelSet
    vocab_size: int
    max_model_tokens: int
    eos_token_ids: tuple[int, ...]

    def forward(self, batch: ForwardBatch, arena: Arena, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (R, vocab) fp32 for `batch.logit_rows`, in `out` where it is given. Writes K/V to `kv_slots` and
        conv/temporal states to the slots of `state_rows`; touches nothing else. Runs in stream order, without host
        synchronisation."""
        ...
