"""One benchmark of an engine: ceilings, then rows, each beside its floor."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from twinflow.bench.drive import Driver, Timing
from twinflow.bench.floor import Footprint
from twinflow.bench.profile import Profile, profiled
from twinflow.bench.rates import Rates, measure_rates
from twinflow.bench.rows import Row
from twinflow.cache.arena import TORCH_DTYPES
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.groups import CacheLayout
from twinflow.contracts.workers import Role
from twinflow.engine.build import build_engine
from twinflow.engine.capacity import blocks_for
from twinflow.engine.config import EngineConfig
from twinflow.engine.core import Engine
from twinflow.models.checkpoint import read_json
from twinflow.models.hub import resolve_config
from twinflow.models.layers.decoder import Decoder
from twinflow.models.loader import describe_layout

PROFILED_STEPS = 8
DECODE_ROOM_TOKENS = 1024  # beside a decoding sequence's context: what it generates while others' prompts are computed


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of one round: all prompts of a prefill row, one step of a decode row. `floor_s`: no device with these ceilings
    could be faster."""

    row: Row
    timing: Timing
    floor_s: float
    profile: Profile | None = None

    @property
    def tokens_per_s(self) -> float:
        tokens = self.row.batch * (self.row.tokens if self.row.kind == "prefill" else 1)
        return tokens / self.timing.seconds

    @property
    def efficiency(self) -> float:
        return self.floor_s / self.timing.seconds


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device. `peak_bytes` counts torch's allocator, in which a GPU's arena is not."""

    weights_bytes: int
    arena_bytes: int
    peak_bytes: int

    @property
    def workspace_bytes(self) -> int:
        """What there was at most beside weights and arena."""
        return max(0, self.peak_bytes - self.weights_bytes)


@dataclass(slots=True)
class Bench:
    """Measures `rows` on one engine. `rates` are there from the start of the first row, `memory` after the last one."""

    config: EngineConfig
    rows: tuple[Row, ...]
    rounds: int
    steps: int
    profile: bool = False
    rates: Rates = field(init=False)
    memory: Memory | None = field(init=False, default=None)

    def run(self, show: Callable[[Result], None], ready: Callable[[Rates, Footprint], None]) -> None:
        """`ready` is called once the engine stands, `show` with each result as it comes."""
        device = self.config.device
        dtype = describe(self.config).attention.tensors[0].dtype
        if device != "cpu":
            torch.cuda.set_device(torch.device(device).index or 0)
        self.rates = measure_rates(device, TORCH_DTYPES[dtype])
        if device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        engine, _ = build_engine(self.config, lambda _: None, None)
        assert isinstance(engine.model, Decoder)
        footprint = Footprint.of(engine.model)
        ready(self.rates, footprint)
        try:
            for row in self.rows:
                show(self._row(engine, footprint, row))
        finally:
            engine.close()
        peak = torch.cuda.max_memory_allocated() if device != "cpu" else 0
        self.memory = Memory(footprint.weights_bytes, engine.ready.arena_bytes, peak)

    def _row(self, engine: Engine, footprint: Footprint, row: Row) -> Result:
        driver = Driver(engine)
        profiles: list[Profile] = []
        if row.kind == "prefill":
            timing = driver.prefill(row, self.rounds)
            if self.profile:
                profiles.append(profiled(lambda: driver.prompts(row), self.config.device, 1))
        else:

            def look() -> None:
                steps = lambda: driver.step(PROFILED_STEPS, row.batch)  # noqa: E731
                profiles.append(profiled(steps, self.config.device, PROFILED_STEPS))

            timing = driver.decode(row, self.rounds, self.steps, look if self.profile else None)
        work = footprint.work(row, timing.context_tokens)
        floor = self.rates.least_s(work.moved_bytes, work.operations)
        return Result(row, timing, floor, profiles[0] if profiles else None)


def describe(config: EngineConfig) -> CacheLayout:
    """The layout that an engine of these settings will have, but for the model's identity."""
    return describe_layout(
        read_json(resolve_config(config.model)),
        dtype=config.dtype,
        block_tokens=config.block_tokens,
        state_dtype=config.state_dtype,
    )


def slots_for(rows: Iterable[Row]) -> int:
    """Sequences that run at once at most."""
    return max(row.batch for row in rows)


def cache_bytes_for(layout: CacheLayout, rows: Iterable[Row]) -> int:
    """An arena in which every row runs with nothing evicted or waiting: a slot to run in and one for a checkpoint each."""
    rows = tuple(rows)
    if not rows:
        raise BadRequest("there is no row to measure", param="rows")
    blocks = max(row.batch * blocks_for(row.tokens + DECODE_ROOM_TOKENS, layout) for row in rows)
    return 2 * slots_for(rows) * layout.slot_bytes + (blocks + 1) * layout.block_bytes


def config_for(rows: tuple[Row, ...], model: str, **settings: Any) -> EngineConfig:
    """Of an aggregated worker without a transport, with room for `rows`. `settings` are `EngineConfig`'s; None = as it is
    by default, or for cache_bytes: as much as the rows need."""
    slots = slots_for(rows)
    chosen: dict[str, Any] = {"max_running": slots, "checkpoint_slots": slots, "transport": "none"}
    chosen |= {name: value for name, value in settings.items() if value is not None}
    config = EngineConfig(model, "bench", "0", Role.BOTH, **chosen)
    return config if "cache_bytes" in chosen else replace(config, cache_bytes=cache_bytes_for(describe(config), rows))
