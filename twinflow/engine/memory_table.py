"""The lines that say what a device's memory holds: `twinflow plan` prints them, and each worker when it starts. Pure."""

from collections.abc import Iterator

from twinflow.contracts.workers import Role
from twinflow.engine.capacity import Ask, Capacity
from twinflow.models.shape import ModelShape

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
DTYPES = ("float32", "bfloat16")


def human(size_bytes: int) -> str:
    for unit, name in UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} B"


def memory_lines(shape: ModelShape, ask: Ask, capacity: Capacity) -> Iterator[str]:
    g, c = capacity.geometry, capacity
    if c.usable_bytes is not None and c.device_bytes is not None:
        others = ", ".join(f"{d} {human(shape.weights_bytes(d))}" for d in DTYPES if d != shape.dtype)
        yield _row("device", c.device_bytes, "")
        yield _row("usable", c.usable_bytes, f"{ask.utilisation:.0%} of it")
        yield _row("weights", c.weights_bytes, f"{shape.dtype} ({others})")
        yield _row("workspace", c.workspace_bytes, "")
        for term in c.workspace:
            yield _row(f"  {term.name}", term.size_bytes, term.formula)
    yield _row("arena", g.total_bytes, "")
    yield _row(
        "  blocks", c.blocks_bytes, f"{g.blocks:,} × {human(g.block_bytes)}, {c.layout.block_tokens} tokens each"
    )
    further = "checkpoints and prompts under lease" if c.role is Role.PREFILL else "checkpoints"
    what = f"{g.slot_floor:,} × {human(g.slot_bytes)}: {c.max_running:,} running + {g.slot_floor - c.max_running:,} {further}"
    yield _row("  slots", c.slots_bytes, what)
    yield _row("  unused", c.unused_bytes, f"{c.unused_bytes / g.total_bytes:.3%} of the arena")
    yield f"{'':<30} the boundary moves on demand: up to {g.slots:,} slots beside {g.block_floor:,} blocks"


def _row(name: str, size_bytes: int, text: str) -> str:
    return f"{name:<16} {human(size_bytes):>12}  {text}".rstrip()
