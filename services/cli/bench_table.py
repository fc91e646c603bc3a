"""What `twinflow bench` prints, as lines of text and as JSON. Pure but for the device's name."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from twinflow.bench.floor import Footprint
from twinflow.bench.profile import Profile
from twinflow.bench.rates import Rates
from twinflow.bench.run import Bench, Memory, Result
from twinflow.engine.config import EngineConfig
from twinflow.engine.memory_table import human

NAME_WIDTH = 72


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device != "cpu" else f"cpu, {torch.get_num_threads()} threads"


def short(per_second: float) -> str:
    """Three digits and the unit's prefix: 4.26 T."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if per_second >= unit:
            return f"{per_second / unit:.3g} {name}"
    return f"{per_second:.0f} "


def heading(config: EngineConfig, rates: Rates, footprint: Footprint) -> Iterator[str]:
    yield f"{config.model} ({config.load_format}, {config.dtype}, states {config.state_dtype}) on {device_name(config.device)}"
    yield (
        f"copy {short(rates.copy_bytes_per_s)}B/s, read {short(rates.read_bytes_per_s)}B/s, matrix products "
        f"{short(rates.operations_per_s)}FLOP/s"
    )
    yield (
        f"a step reads {human(footprint.read_bytes)} of weights; a sequence keeps {human(footprint.slot_bytes)} of state and "
        f"{human(footprint.token_bytes)} a token"
    )
    yield f"{'row':<20} {'time':>12} {'tokens/s':>12} {'floor':>12} {'efficiency':>10}   rounds"


def row(result: Result, kernels: int) -> Iterator[str]:
    """`kernels`: how many of the profile's to list."""
    rounds = " ".join(f"{1e3 * s:.3f}" for s in result.timing.rounds)
    yield (
        f"{result.row!s:<20} {1e3 * result.timing.seconds:9.3f} ms {result.tokens_per_s:12,.0f} "
        f"{1e3 * result.floor_s:9.3f} ms {result.efficiency:10.2f}   {rounds}"
    )
    if result.profile is not None:
        yield from profile(result.profile, kernels)


def profile(found: Profile, kernels: int) -> Iterator[str]:
    yield f"    busy {1e3 * found.busy_s:.3f} of {1e3 * found.span_s:.3f} ms; calls, ms in all, ms each:"
    for k in found.kernels[:kernels]:
        yield f"    {k.calls:7.1f} {1e3 * k.seconds:9.4f} {1e3 * k.seconds / k.calls:9.5f}  {k.name[:NAME_WIDTH]}"


def memory(used: Memory) -> str:
    if not used.peak_bytes:
        return f"weights {human(used.weights_bytes)}, arena {human(used.arena_bytes)}"
    return (
        f"weights {human(used.weights_bytes)}, arena {human(used.arena_bytes)}, workspace at most "
        f"{human(used.workspace_bytes)} ({used.workspace_bytes:,} B)"
    )


def as_json(bench: Bench, results: list[Result]) -> dict[str, Any]:
    return {
        "device": device_name(bench.config.device),
        "torch": torch.__version__,
        "engine": asdict(bench.config) | {"role": bench.config.role.value},
        "rates": asdict(bench.rates),
        "memory": bench.memory and asdict(bench.memory) | {"workspace_bytes": bench.memory.workspace_bytes},
        "rows": [
            {
                "row": str(r.row),
                "seconds": r.timing.seconds,
                "rounds": r.timing.rounds,
                "context_tokens": r.timing.context_tokens,
                "tokens_per_s": r.tokens_per_s,
                "floor_s": r.floor_s,
                "efficiency": r.efficiency,
                "profile": None if r.profile is None else asdict(r.profile),
            }
            for r in results
        ],
    }
