"""Cache groups: what the layers of a hybrid model keep, described once so that later code only iterates.

A model family turns its config into a `CacheLayout`; the cache, the transfer plan and the handshake read nothing else.
No torch here: dtypes are names (`"float32"`, `"bfloat16"`, `"float16"`), sizes are bytes.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import Enum

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}

LAYOUT_VERSION = 1


class GroupKind(Enum):
    """How hits of a group behave. ATTENTION: a hit of n tokens implies every shorter one. STATE: only saved checkpoints."""

    ATTENTION = "attention"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a layer of a group keeps, per token (ATTENTION) or per sequence (STATE).

    `shape` is per token without the token axis for ATTENTION, e.g. (kv_heads, head_dim); the whole tensor for STATE,
    e.g. (value_heads, value_dim, key_dim). `sharded_dim` is the axis split under tensor parallelism, None if replicated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharded_dim: int | None = 0

    @property
    def size_bytes(self) -> int:
        n = DTYPE_BYTES[self.dtype]
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share one kind of memory: all attention layers, or all state layers, of a model.

    Memory order of a block: `[layer][k|v][kv head][token][dim]`; of a slot: `[layer][temporal | conv]` (tensors in the
    order of `tensors`). Blocks and slots are contiguous, at their natural size.
    """

    name: str
    kind: GroupKind
    layer_ids: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    block_tokens: int | None = None  # tokens of a block; ATTENTION only

    def __post_init__(self) -> None:
        if (self.kind is GroupKind.ATTENTION) != (self.block_tokens is not None):
            raise ValueError(
                f"group {self.name!r}: block_tokens={self.block_tokens} does not fit kind {self.kind.value}"
            )

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer: per token for ATTENTION, per sequence for STATE."""
        return sum(t.size_bytes for t in self.tensors)

    @property
    def unit_bytes(self) -> int:
        """Bytes of what is handed out: a block (ATTENTION) or a slot (STATE)."""
        return self.layer_bytes * len(self.layer_ids) * (self.block_tokens or 1)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All groups of a model plus its identity: decides whether bytes of two workers are interchangeable.

    Exactly one ATTENTION and one STATE group today; the tuple keeps the door open for more.
    """

    model_id: str  # content identity of the weights (e.g. digest of config and weight headers), not a path
    groups: tuple[GroupSpec, ...]
    layout_version: int = LAYOUT_VERSION

    @property
    def attention(self) -> GroupSpec:
        return next(g for g in self.groups if g.kind is GroupKind.ATTENTION)

    @property
    def state(self) -> GroupSpec:
        return next(g for g in self.groups if g.kind is GroupKind.STATE)

    @property
    def block_tokens(self) -> int:
        assert self.attention.block_tokens is not None
        return self.attention.block_tokens

    @property
    def block_bytes(self) -> int:
        return self.attention.unit_bytes

    @property
    def slot_bytes(self) -> int:
        return self.state.unit_bytes

    def describe(self) -> str:
        """Canonical JSON of everything that the fingerprint covers; printed for both sides when a handshake refuses."""
        return json.dumps(asdict(self), sort_keys=True, default=lambda o: o.value)

    def fingerprint(self) -> str:
        """Hex digest (32 characters) of `describe()`. Independent of the software version."""
        return hashlib.blake2b(self.describe().encode(), digest_size=16).hexdigest()
