"""The least that a model's work takes: bytes that must move and operations that must be done, counted on the loaded model.

    decode   weights once + per sequence: state read and written, K/V of its context read, of one token written
    prefill  weights once + per prompt: state written, K/V written; attention over every earlier token and itself

Weights are read once whatever the batch; activations, tables and logits are left out (they fit into caches).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch

from twinflow.bench.rows import Row
from twinflow.kernels.base import KernelSet
from twinflow.models.layers.attention import Attention
from twinflow.models.layers.decoder import Decoder

STATE_OPERATIONS = (
    6  # per element of a temporal state and token: decay, read along the key, correct, read along the query
)


@dataclass(frozen=True, slots=True)
class Work:
    moved_bytes: float
    operations: float


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one model. `matrix` and `head`: elements of matrices applied to every token, and to rows that need logits.
    `pair_operations`: of attention, all layers, for one query token and one key token."""

    weights_bytes: int  # all of them, embedding included
    read_bytes: int  # those that a step reads: of an embedding of its own only a few rows are
    matrix: int
    head: int
    pair_operations: int
    state_elements: int
    slot_bytes: int
    token_bytes: int

    @classmethod
    def of(cls, model: Decoder) -> "Footprint":
        blocks = [t for block in model.blocks for t in tensors(block)]
        rest = [*tensors(model.norm), model.head]
        tied = model.embedding is model.head
        attention = [b.mixer for b in model.blocks if isinstance(b.mixer, Attention)]
        layout = model.layout
        temporal = layout.state.tensors[0]
        read = sum(t.nbytes for t in (*blocks, *rest))
        return cls(
            weights_bytes=read + (0 if tied else model.embedding.nbytes),
            read_bytes=read,
            matrix=sum(t.numel() for t in blocks if t.ndim == 2),
            head=model.head.numel(),
            pair_operations=sum(4 * layer.heads * layer.head_dim for layer in attention),
            state_elements=len(layout.state.layer_ids) * torch.Size(temporal.shape).numel(),
            slot_bytes=layout.slot_bytes,
            token_bytes=layout.block_bytes // layout.block_tokens,
        )

    def work(self, row: Row, context_tokens: float | None = None) -> Work:
        """`context_tokens`: of a decoding sequence on average, where more is known than the row says."""
        token = 2 * self.matrix + STATE_OPERATIONS * self.state_elements
        moved: float
        if row.kind == "prefill":
            pairs = row.tokens * (row.tokens + 1) / 2
            moved = self.slot_bytes + row.tokens * self.token_bytes
            operations = row.tokens * token + pairs * self.pair_operations + 2 * self.head
        else:
            context = row.tokens if context_tokens is None else context_tokens
            moved = 2 * self.slot_bytes + (context + 1) * self.token_bytes
            operations = token + context * self.pair_operations + 2 * self.head
        return Work(self.read_bytes + row.batch * moved, row.batch * operations)


def tensors(layer: object) -> Iterator[torch.Tensor]:
    """Every tensor in a layer's fields, at any depth."""
    if not is_dataclass(layer):
        return
    for field in fields(layer):
        value = getattr(layer, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif not isinstance(value, KernelSet):
            yield from tensors(value)
