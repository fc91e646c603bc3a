"""The operations a model is built from. Models hold a `KernelSet`; `select.py` decides which versions are in it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Chunked kernels of state layers pass a state on, and can leave one behind, after so many tokens.
STATE_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """An RMS norm over each head of q or k: scaled by weight (D,), or by 1 + weight with `unit_offset`."""

    weight: torch.Tensor
    eps: float
    unit_offset: bool


@dataclass(frozen=True, slots=True)
class Snapshots:
    """States to keep besides the last ones of a batch of B sequences, in one list in the order of the sequences: those of
    sequence s are entries `starts[s]` to `starts[s + 1] - 1`; entries behind the last sequence's are never read.

    starts (B+1,) int32; after (N,) int32, the tokens of the sequence in this batch after which the state is taken:
    ascending multiples of `STATE_CHUNK_TOKENS`, at most their number; rows (N,) int64, the pool rows that get them, of
    nobody else in the batch. Sequences with one token have none.
    """

    starts: torch.Tensor
    after: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One implementation of each operation; signatures and semantics are those of `<op>/reference.py`.

    State kernels update their pools in place by row index; index -1 means padding everywhere.
    """

    name: str  # "reference" or "triton"
    rms_norm: Callable[..., torch.Tensor]
    rms_norm_unit_offset: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_rms_norm: Callable[..., torch.Tensor]
    gated_group_norm: Callable[..., torch.Tensor]
    sigmoid_gate: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]
    linear_residual: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    linear_swiglu: Callable[..., torch.Tensor]
    rotary_angles: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    attention_inputs: Callable[..., torch.Tensor]
    paged_attention: Callable[..., torch.Tensor]
    causal_conv1d: Callable[..., torch.Tensor]
    gated_delta: Callable[..., torch.Tensor]
    gated_delta_decode: Callable[..., torch.Tensor]
    mamba2_ssd: Callable[..., torch.Tensor]
    sample_tokens: Callable[..., torch.Tensor]
    token_logprobs: Callable[..., tuple[torch.Tensor, torch.Tensor]]
