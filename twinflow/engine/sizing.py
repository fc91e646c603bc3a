"""How large a worker's arena is, decided before its model is loaded, by what `twinflow plan` prints.

config.json → ModelShape ─┐
EngineConfig → Ask ───────┴→ plan_capacity → the arena's geometry, and the lines that say how it came about
"""

import math
from pathlib import Path

import torch

from twinflow.contracts.errors import ModelError
from twinflow.engine.capacity import Ask, Capacity, plan_capacity
from twinflow.engine.config import EngineConfig
from twinflow.models.checkpoint import Checkpoint, read_json
from twinflow.models.hub import resolve_config
from twinflow.models.shape import ModelShape, describe_model

CPU_CACHE_BYTES = 256 << 20  # host memory is shared with everything else: a share of it says nothing


def shape_of(model: str, *, dtype: str, block_tokens: int, state_dtype: str, stored: bool = True) -> ModelShape:
    """Of a folder, a config.json or a hub id. `stored`: weights beside it decide `dtype` "auto" when the config says nothing.
    Raises ModelError or Unsupported as loading it would."""
    path = resolve_config(model)
    return describe_model(
        read_json(path),
        dtype=dtype,
        block_tokens=block_tokens,
        state_dtype=state_dtype,
        stored_dtype=_main_dtype(path.parent) if stored else None,
    )


def ask_of(config: EngineConfig, device_bytes: int | None) -> Ask:
    """`device_bytes`: of the whole GPU, None on CPU. Bytes that were given win over a share of the device."""
    given = config.cache_bytes or (CPU_CACHE_BYTES if device_bytes is None else None)
    return Ask(
        role=config.role,
        max_running=config.max_running,
        device_bytes=None if given else device_bytes,
        utilisation=config.utilisation,
        cache_bytes=given,
        checkpoint_slots=config.checkpoint_slots,
        step_tokens=config.step_tokens,
    )


def plan_worker(config: EngineConfig, memory: tuple[int, int] | None) -> tuple[ModelShape, Ask, Capacity]:
    """`memory`: free and total bytes of the device, None on CPU. Raises ModelError, with the numbers, for what cannot fit."""
    shape = shape_of(
        config.model,
        dtype=config.dtype,
        block_tokens=config.block_tokens,
        state_dtype=config.state_dtype,
        stored=config.load_format != "dummy",
    )
    ask = ask_of(config, None if memory is None else memory[1])
    capacity = plan_capacity(shape, ask)
    if memory is not None and capacity.usable_bytes is not None and capacity.usable_bytes > memory[0]:
        free, total = memory
        raise ModelError(
            f"utilisation={config.utilisation:g} of {config.device} is {capacity.usable_bytes:,} B, but only {free:,} of its "
            f"{total:,} B are free; it can be {math.floor(100 * free / total) / 100:g}, or more once others leave",
            param="utilisation",
        )
    return shape, ask, capacity


def device_memory(device: str) -> tuple[int, int] | None:
    """Free and total bytes of a GPU, None for the CPU."""
    return None if device == "cpu" else torch.cuda.mem_get_info(torch.device(device))


def _main_dtype(folder: Path) -> str | None:
    try:
        return Checkpoint.open(folder).main_dtype
    except ModelError:
        return None  # a config alone
