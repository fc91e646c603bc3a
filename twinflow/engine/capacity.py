"""What one worker's memory will hold, before it is started: device bytes → weights, workspace, arena → blocks and slots.

    device · utilisation = weights + workspace + arena          (what is not used stays with the driver)
    arena                = blocks + slots + less than one block
    slots                = one per running request + further ones for checkpoints

Pure. The arena is split by the very function that a worker splits it with, so the numbers are those of its pools.
"""

import math
from dataclasses import dataclass
from enum import Enum

from twinflow.cache.arena import ALIGN_BYTES, ArenaGeometry
from twinflow.contracts.errors import BadRequest, ModelError
from twinflow.contracts.groups import DTYPE_BYTES, CacheLayout
from twinflow.contracts.workers import Role
from twinflow.models.shape import ModelShape

STATE_CHUNK_TOKENS = 64  # chunked kernels of state layers keep one state per so many tokens
LIVE_COPIES = 2  # kernels work on fp32 copies beside 16-bit activations
GRAPH_BYTES = 32 << 20  # allowance per captured decode graph
LIBRARY_BYTES = 256 << 20  # allowance for workspaces of matrix libraries, kernels and split attention


class Bound(Enum):
    """What keeps one more request of a length from running."""

    STATE = "state"  # every running slot is taken: max_running
    ATTENTION = "attention"  # blocks
    MODEL = "model"  # longer than the model's context


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one request."""

    prompt_tokens: int
    output_tokens: int

    def held_tokens(self, role: Role) -> int:
        """Those whose KV a worker of this role holds: a prefill worker never sees the reply."""
        return self.prompt_tokens + (0 if role is Role.PREFILL else self.output_tokens)


@dataclass(frozen=True, slots=True)
class Ask:
    """What an operator chooses. Either `device_bytes` (of the whole device) or `cache_bytes` (of the arena alone).

    `checkpoint_slots` None: as many as cached conversations of `typical_tokens` fit beside the running requests.
    """

    role: Role
    max_running: int
    device_bytes: int | None = None
    utilisation: float = 0.9
    cache_bytes: int | None = None
    checkpoint_slots: int | None = None
    typical_tokens: int | None = None
    step_tokens: int = 2048

    def __post_init__(self) -> None:
        if (self.device_bytes is None) == (self.cache_bytes is None):
            raise BadRequest("give either the device's bytes or the cache's", param="device_bytes")
        if not 0 < self.utilisation <= 1:
            raise BadRequest(f"utilisation {self.utilisation} must be above 0 and at most 1", param="utilisation")
        for name in ("max_running", "step_tokens"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if self.checkpoint_slots is not None and self.checkpoint_slots < 0:
            raise BadRequest(f"checkpoint_slots must be 0 or more, got {self.checkpoint_slots}", param="checkpoint_slots")
        if self.checkpoint_slots is None and self.typical_tokens is None:
            raise BadRequest("give the number of checkpoint slots or a typical length", param="checkpoint_slots")


@dataclass(frozen=True, slots=True)
class Term:
    """A summand of the workspace and how it came about."""

    name: str
    size_bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class RequestCost:
    """One request of `tokens` tokens. `at_once`: how many of them run here together; `bound`: what stops the next one."""

    tokens: int
    blocks: int
    slots: int
    size_bytes: int
    at_once: int
    bound: Bound


@dataclass(frozen=True, slots=True)
class Capacity:
    """A worker's memory. `weights_bytes` and `workspace` are outside the arena, and empty when only it was asked about."""

    role: Role
    layout: CacheLayout
    geometry: ArenaGeometry
    max_running: int
    checkpoint_slots: int
    max_model_tokens: int
    device_bytes: int | None
    usable_bytes: int | None
    weights_bytes: int
    workspace: tuple[Term, ...]

    @property
    def workspace_bytes(self) -> int:
        return sum(term.size_bytes for term in self.workspace)

    @property
    def token_bytes(self) -> int:
        return self.layout.block_bytes // self.layout.block_tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens of attention KV; states have no length."""
        return self.geometry.blocks * self.layout.block_tokens

    @property
    def max_request_tokens(self) -> int:
        """The longest request that this worker takes."""
        return min(self.capacity_tokens, self.max_model_tokens)

    @property
    def blocks_bytes(self) -> int:
        return self.geometry.blocks * self.geometry.block_bytes

    @property
    def slots_bytes(self) -> int:
        return self.geometry.slots * self.geometry.slot_bytes

    @property
    def unused_bytes(self) -> int:
        return self.geometry.total_bytes - self.blocks_bytes - self.slots_bytes

    @property
    def all_running_tokens(self) -> int:
        """Up to this length `max_running` requests run at once, bounded by state slots; longer ones by attention blocks."""
        blocks = self.geometry.blocks // self.max_running
        return min(blocks * self.layout.block_tokens, self.max_model_tokens)

    def request(self, tokens: int) -> RequestCost:
        """What a request of `tokens` tokens costs with nothing of it cached."""
        blocks = blocks_for(tokens, self.layout)
        size = request_bytes(tokens, self.layout)
        if tokens > self.max_model_tokens:
            return RequestCost(tokens, blocks, 1, size, 0, Bound.MODEL)
        fit = self.geometry.blocks // blocks
        bound = Bound.ATTENTION if fit < self.max_running else Bound.STATE
        return RequestCost(tokens, blocks, 1, size, min(fit, self.max_running), bound)

    def at_most(self, tokens: int) -> int:
        """How many requests of `tokens` tokens would run at once were the arena split for them alone, no checkpoint kept."""
        return self.geometry.total_bytes // request_bytes(tokens, self.layout)


def plan_capacity(shape: ModelShape, ask: Ask) -> Capacity:
    """Raises ModelError, with the numbers and what would fit, when not even one block is left."""
    layout = shape.layout
    workspace = () if ask.device_bytes is None else plan_workspace(shape, ask)
    weights = 0 if ask.device_bytes is None else shape.weights_bytes()
    usable = None if ask.device_bytes is None else int(ask.device_bytes * ask.utilisation)
    outside = weights + sum(term.size_bytes for term in workspace)
    arena = ask.cache_bytes if usable is None else usable - outside
    assert arena is not None
    further = ask.checkpoint_slots
    if further is None:
        assert ask.typical_tokens is not None
        further = balanced_checkpoints(layout, arena, ask.max_running, ask.typical_tokens)
    try:
        geometry = ArenaGeometry.split(layout, arena, ask.max_running + further)
    except ValueError as error:
        if usable is None:
            raise ModelError(str(error), param="cache_bytes") from error
        raise ModelError(_too_small(layout, ask, usable, outside, arena, further), param="device_bytes") from error
    return Capacity(
        role=ask.role,
        layout=layout,
        geometry=geometry,
        max_running=ask.max_running,
        checkpoint_slots=further,
        max_model_tokens=shape.max_model_tokens,
        device_bytes=ask.device_bytes,
        usable_bytes=usable,
        weights_bytes=weights,
        workspace=workspace,
    )


def plan_workspace(shape: ModelShape, ask: Ask) -> tuple[Term, ...]:
    """What one step needs beside weights and arena. Layers run one after another and reuse the same memory, so the widest
    counts once. A prefill worker captures no decode graphs."""
    size = DTYPE_BYTES[shape.dtype]
    live = LIVE_COPIES * shape.live_elements * size
    temporal = shape.layout.state.tensors[0].size_bytes
    chunks = math.ceil(ask.step_tokens / STATE_CHUNK_TOKENS)
    logit = size + 2 * DTYPE_BYTES["float32"]
    rows = ask.max_running
    blocks = math.ceil(shape.max_model_tokens / shape.layout.block_tokens)
    terms = [
        Term("activations", ask.step_tokens * live, f"{ask.step_tokens} step tokens × {live} B, the widest layer"),
        Term("chunk states", chunks * temporal, f"{chunks} chunks × {temporal} B, one layer's temporal state"),
        Term("logits", rows * shape.vocab_size * logit, f"{rows} rows × {shape.vocab_size} ids × {logit} B"),
        Term("block tables", rows * blocks * 4, f"{rows} rows × {blocks} blocks × 4 B"),
        Term("libraries", LIBRARY_BYTES, "allowance"),
    ]
    if ask.role is not Role.PREFILL:
        graphs = (rows - 1).bit_length() + 1
        terms.append(Term("decode graphs", graphs * GRAPH_BYTES, f"{graphs} batch sizes × {GRAPH_BYTES} B, allowance"))
    return tuple(terms)


def balanced_checkpoints(layout: CacheLayout, arena_bytes: int, max_running: int, tokens: int) -> int:
    """Checkpoint slots such that blocks and checkpoints run out together: what `max_running` requests of `tokens` tokens
    leave holds so many cached conversations of that length, one checkpoint each."""
    each = request_bytes(tokens, layout)
    return max(0, arena_bytes // ALIGN_BYTES * ALIGN_BYTES - max_running * each) // each


def blocks_for(tokens: int, layout: CacheLayout) -> int:
    return max(1, math.ceil(tokens / layout.block_tokens))


def request_bytes(tokens: int, layout: CacheLayout) -> int:
    """Blocks of `tokens` tokens and one slot."""
    return blocks_for(tokens, layout) * layout.block_bytes + layout.slot_bytes


def _too_small(layout: CacheLayout, ask: Ask, usable: int, outside: int, arena: int, further: int) -> str:
    slots = ask.max_running + further
    need = outside + slots * layout.slot_bytes + layout.block_bytes + ALIGN_BYTES
    fits = max(0, arena - layout.block_bytes) // layout.slot_bytes
    return (
        f"{slots} slots of {layout.slot_bytes} B and a block of {layout.block_bytes} B do not fit: {usable} B usable − "
        f"{outside} B weights and workspace = {max(0, arena)} B, room for {fits} slots; "
        f"it takes a device of {math.ceil(need / ask.utilisation)} B"
        + (", or fewer running requests or checkpoints" if fits else "")
    )
