"""What `twinflow plan` prints, as lines of text and as JSON. Pure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from twinflow.engine.capacity import Ask, Bound, Capacity, Lengths, RequestCost
from twinflow.engine.memory_table import DTYPES, human, memory_lines
from twinflow.models.shape import ModelShape, by_kind

BOUNDS = {
    Bound.STATE: "state: --max-running",
    Bound.ATTENTION: "attention: blocks",
    Bound.MODEL: "the model's context",
}


def lines(
    name: str,
    shape: ModelShape,
    ask: Ask,
    capacity: Capacity,
    costs: Mapping[str, RequestCost],
    lengths: Mapping[str, Lengths],
    *,
    tensors: bool,
) -> Iterator[str]:
    layout = capacity.layout
    yield f"{name}: {shape.architecture}, {shape.parameters:,} parameters, {shape.dtype}, role {ask.role.value}"
    if shape.refusal:
        yield f"  sized only: {shape.refusal}"
    yield ""
    yield from memory_lines(shape, ask, capacity)
    yield ""
    yield from _tensors(shape) if tensors else ()
    token, model = capacity.token_bytes, capacity.max_model_tokens
    yield f"capacity         {capacity.capacity_tokens:,} tokens of attention KV, {token:,} B each"
    yield f"longest request  {capacity.max_request_tokens:,} tokens (the model's context: {model:,})"
    yield f"a sequence       one slot of {layout.slot_bytes:,} B, as much as {layout.slot_bytes / token:,.0f} tokens of KV"
    yield (
        f"the bound        up to {capacity.all_running_tokens:,} tokens each, {capacity.max_running} requests run at once and "
        "slots bound them; beyond, blocks do"
    )
    yield ""
    yield from _costs(capacity, costs, lengths)
    yield "  kept beside: finished ones that stay cached, each with its blocks and a checkpoint; at most: all at once, were"
    yield "  --max-running as high as memory allows"
    yield ""
    yield "start a worker with"
    yield f"  {' '.join(options(shape, ask, capacity))}"


def options(shape: ModelShape, ask: Ask, capacity: Capacity) -> list[str]:
    """What makes a worker's pools those of the plan."""
    return [
        f"--engine.cache-bytes={capacity.geometry.total_bytes}",
        f"--engine.max-running={capacity.max_running}",
        f"--engine.checkpoint-slots={capacity.checkpoint_slots}",
        f"--engine.block-tokens={capacity.layout.block_tokens}",
        f"--engine.step-tokens={ask.step_tokens}",
        f"--engine.dtype={shape.dtype}",
        f"--engine.state-dtype={capacity.layout.state.tensors[0].dtype}",
    ]


def as_json(
    shape: ModelShape,
    ask: Ask,
    capacity: Capacity,
    costs: Mapping[str, RequestCost],
    lengths: Mapping[str, Lengths],
    *,
    tensors: bool,
) -> dict[str, Any]:
    c, g = capacity, capacity.geometry
    return {
        "model": {
            "architecture": shape.architecture,
            "parameters": shape.parameters,
            "dtype": shape.dtype,
            "max_model_tokens": shape.max_model_tokens,
            "refusal": shape.refusal,
        },
        "role": ask.role.value,
        "device_bytes": c.device_bytes,
        "usable_bytes": c.usable_bytes,
        "weights_bytes": c.weights_bytes,
        "weights_bytes_by_dtype": {d: shape.weights_bytes(d) for d in DTYPES},
        "workspace_bytes": c.workspace_bytes,
        "workspace": [asdict(term) for term in c.workspace],
        "arena": asdict(g) | {"slot_floor": g.slot_floor, "block_floor": g.block_floor, "unused_bytes": c.unused_bytes},
        "block_tokens": c.layout.block_tokens,
        "token_bytes": c.token_bytes,
        "max_running": c.max_running,
        "checkpoint_slots": c.checkpoint_slots,
        "capacity_tokens": c.capacity_tokens,
        "max_request_tokens": c.max_request_tokens,
        "all_running_tokens": c.all_running_tokens,
        "requests": [_cost_json(name, cost, c, lengths.get(name)) for name, cost in costs.items()],
        "options": options(shape, ask, capacity),
        **({"tensors": [_tensor_json(*item) for item in by_kind(shape.tensors).items()]} if tensors else {}),
    }


def _costs(capacity: Capacity, costs: Mapping[str, RequestCost], lengths: Mapping[str, Lengths]) -> Iterator[str]:
    yield (
        f"{'a request of':<30} {'blocks':>7} {'slots':>5} {'bytes':>12} {'at once':>8}  {'bound by':<21} {'kept beside':>11} "
        f"{'at most':>8}"
    )
    for name, cost in costs.items():
        label = f"{cost.tokens:,} token{'s' * (cost.tokens != 1)}"
        if (given := lengths.get(name)) is not None:
            label = f"{name}: {given.prompt_tokens:,} + {given.output_tokens:,} tokens"
        most = capacity.at_most(cost.tokens) if cost.bound is not Bound.MODEL else 0
        yield (
            f"{label:<30} {cost.blocks:>7,} {cost.slots:>5} {human(cost.size_bytes):>12} {cost.at_once:>8,}  "
            f"{BOUNDS[cost.bound]:<21} {cost.cached:>11,} {most:>8,}"
        )


def _tensors(shape: ModelShape) -> Iterator[str]:
    for (name, dims, dtype), count in by_kind(shape.tensors).items():
        kept = f" {str(dtype).removeprefix('torch.')}" if dtype is not None else ""
        yield f"  {count:>4} × {name} {dims}{kept}: {count * math.prod(dims):,}"
    yield ""


def _tensor_json(kind: tuple[str, tuple[int, ...], Any], count: int) -> dict[str, Any]:
    name, dims, dtype = kind
    kept = str(dtype).removeprefix("torch.") if dtype is not None else None
    return {"name": name, "shape": list(dims), "dtype": kept, "count": count}


def _cost_json(name: str, cost: RequestCost, capacity: Capacity, lengths: Lengths | None) -> dict[str, Any]:
    return {
        "name": name,
        **({"prompt_tokens": lengths.prompt_tokens, "output_tokens": lengths.output_tokens} if lengths else {}),
        **asdict(cost),
        "bound": cost.bound.value,
        "at_most": capacity.at_most(cost.tokens) if cost.bound is not Bound.MODEL else 0,
    }
