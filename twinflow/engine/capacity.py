"""What one worker's memory will hold, before it is started: device bytes → weights, workspace, arena → blocks and slots.

    device · utilisation = weights + workspace + arena          (what is not used stays with the driver)
    arena                = blocks + slots + less than one block
    slots                ≥ one per running request + those kept for checkpoints (the boundary moves between both floors)

Pure. The arena is split by the very function that a worker splits it with, so the numbers are those of its pools.
"""

import math
from dataclasses import dataclass
from enum import Enum

from twinflow.cache.arena import ALIGN_BYTES, ArenaGeometry
from twinflow.contracts.errors import BadRequest, ModelError
from twinflow.contracts.groups import DTYPE_BYTES, CacheLayout
from twinflow.contracts.workers import Role
from twinflow.kernels.base import STATE_CHUNK_TOKENS
from twinflow.models.shape import ModelShape

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
    `max_running` and `checkpoint_slots` are the slots that there are whatever happens."""

    role: Role
    max_running: int
    device_bytes: int | None = None
    utilisation: float = 0.9
    cache_bytes: int | None = None
    checkpoint_slots: int = 0
    step_tokens: int = 2048

    def __post_init__(self) -> None:
        if (self.device_bytes is None) == (self.cache_bytes is None):
            raise BadRequest("give either the device's bytes or the cache's", param="device_bytes")
        if not 0 < self.utilisation <= 1:
            raise BadRequest(f"utilisation {self.utilisation} must be above 0 and at most 1", param="utilisation")
        for name in ("max_running", "step_tokens"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if self.checkpoint_slots < 0:
            raise BadRequest(
                f"checkpoint_slots must be 0 or more, got {self.checkpoint_slots}", param="checkpoint_slots"
            )


@dataclass(frozen=True, slots=True)
class Term:
    """A summand of the workspace and how it came about."""

    name: str
    size_bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class RequestCost:
    """One request of `tokens` tokens. `at_once`: how many of them run here together; `bound`: what stops the next one;
    `cached`: how many finished ones of that length stay beside those, each with its blocks and one checkpoint."""

    tokens: int
    blocks: int
    slots: int
    size_bytes: int
    at_once: int
    bound: Bound
    cached: int


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
        """Tokens of attention KV while no more slots are taken than there always are; states have no length."""
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
        """Of those that there always are."""
        return self.geometry.slot_floor * self.geometry.slot_bytes

    @property
    def unused_bytes(self) -> int:
        return self.unused_beside(self.geometry.slot_floor)

    def unused_beside(self, slots: int) -> int:
        """Bytes of the arena that are neither in a block nor in a slot while the boundary stands at `slots`."""
        g = self.geometry
        return g.total_bytes - slots * g.slot_bytes - g.blocks_beside(slots) * g.block_bytes

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
            return RequestCost(tokens, blocks, 1, size, 0, Bound.MODEL, 0)
        fit = self.geometry.blocks // blocks
        bound = Bound.ATTENTION if fit < self.max_running else Bound.STATE
        running = min(fit, self.max_running)
        return RequestCost(tokens, blocks, 1, size, running, bound, self._kept(blocks) - running)

    def _kept(self, blocks: int) -> int:
        """How many requests of `blocks` blocks and one slot the arena holds, wherever its boundary has to be for that."""
        g = self.geometry
        in_floor = min(g.slot_floor, g.blocks // blocks)
        beyond = g.total_bytes // (blocks * g.block_bytes + g.slot_bytes)
        while beyond * blocks > g.blocks_beside(beyond):  # block floor and rounding
            beyond -= 1
        return max(in_floor, min(beyond, g.slots))

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
    try:
        geometry = ArenaGeometry.split(layout, arena, ask.max_running + ask.checkpoint_slots)
    except ValueError as error:
        if usable is None:
            raise ModelError(str(error), param="cache_bytes") from error
        raise ModelError(_too_small(layout, ask, usable, outside, arena), param="device_bytes") from error
    return Capacity(
        role=ask.role,
        layout=layout,
        geometry=geometry,
        max_running=ask.max_running,
        checkpoint_slots=ask.checkpoint_slots,
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
        Term("activations", ask.step_tokens * live, f"{ask.step_tokens:,} step tokens × {live:,} B, the widest layer"),
        Term("chunk states", chunks * temporal, f"{chunks:,} chunks × {temporal:,} B, one layer's temporal state"),
        Term("logits", rows * shape.vocab_size * logit, f"{rows:,} rows × {shape.vocab_size:,} ids × {logit} B"),
        Term("block tables", rows * blocks * 4, f"{rows:,} rows × {blocks:,} blocks × 4 B"),
        Term("libraries", LIBRARY_BYTES, "allowance"),
    ]
    if ask.role is not Role.PREFILL:
        graphs = (rows - 1).bit_length() + 1
        terms.append(
            Term("decode graphs", graphs * GRAPH_BYTES, f"{graphs} batch sizes × {GRAPH_BYTES:,} B, allowance")
        )
    return tuple(terms)


def blocks_for(tokens: int, layout: CacheLayout) -> int:
    return max(1, math.ceil(tokens / layout.block_tokens))


def request_bytes(tokens: int, layout: CacheLayout) -> int:
    """Blocks of `tokens` tokens and one slot."""
    return blocks_for(tokens, layout) * layout.block_bytes + layout.slot_bytes


def _too_small(layout: CacheLayout, ask: Ask, usable: int, outside: int, arena: int) -> str:
    slots = ask.max_running + ask.checkpoint_slots
    need = outside + slots * layout.slot_bytes + layout.block_bytes + ALIGN_BYTES
    fits = max(0, arena - layout.block_bytes) // layout.slot_bytes
    return (
        f"{slots} slots of {layout.slot_bytes:,} B and a block of {layout.block_bytes:,} B do not fit: {usable:,} B usable − "
        f"{outside:,} B weights and workspace leave {max(0, arena):,} B, room for {fits} slots; "
        f"it takes a device of {math.ceil(need / ask.utilisation / (1 << 30))} GiB"
        + (", or fewer running requests or checkpoints" if fits else "")
    )
