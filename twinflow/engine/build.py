"""Puts one engine together from its settings; the only place where backends are chosen."""

import logging
from collections.abc import Callable

import torch

from twinflow.cache.arena import Arena, ArenaGeometry
from twinflow.cache.base import Cache
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.errors import ModelError
from twinflow.contracts.hashing import pack_tokens, root_hash
from twinflow.contracts.requests import GenerateRequest, SamplingParams
from twinflow.contracts.workers import Role
from twinflow.engine.base import Flush, Mode, Ready, Submit, Work
from twinflow.engine.config import EngineConfig
from twinflow.engine.core import Engine
from twinflow.models.base import HybridModel
from twinflow.models.loader import load_model
from twinflow.transfer.base import PeerArena, Transport
from twinflow.transfer.thread import PullFinished, TransferThread

log = logging.getLogger(__name__)

TransportFactory = Callable[[str, Arena], Transport]

GENERATION = 1  # one transfer generation per process


def build_engine(
    config: EngineConfig, on_pull: Callable[[PullFinished], None], transport: TransportFactory | None
) -> tuple[Engine, Ready]:
    """Loads the model, allocates and registers the arena, warms up. Raises ModelError, or ValueError for a bad setting.

    `on_pull` is called from the transfer thread. `transport` None = a worker that neither gives nor takes.
    """
    torch.set_num_threads(config.threads)
    if config.device.startswith("cuda"):
        torch.cuda.set_device(config.device)  # kernels are launched on the current device
    model = load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        block_tokens=config.block_tokens,
        state_dtype=config.state_dtype,
    )
    try:
        geometry = ArenaGeometry.split(model.layout, config.cache_bytes, config.max_running + config.checkpoint_slots)
    except ValueError as error:
        raise ModelError(str(error), param="cache_bytes") from error
    arena = Arena(model.layout, geometry, config.device)
    cache = HybridCache(model.layout, geometry, arena)
    agent = f"{config.worker_id}/{config.incarnation}/{GENERATION}"
    link = transport(agent, arena) if transport else None
    thread = TransferThread(link, on_pull, serve=config.role is not Role.DECODE) if link else None
    ready = describe(config, model, arena, cache, link)
    engine = Engine(config, model, arena, cache, thread, ready)
    warm_up(engine)
    return engine, ready


def warm_up(engine: Engine) -> None:
    """One request of the largest chunk and two tokens, so that no client pays for first calls; leaves the caches empty."""
    tokens = min(engine.config.chunk_tokens, engine.ready.max_request_tokens - 2)
    if tokens < 1:
        return
    sampling = SamplingParams(max_tokens=2, seed=0, temperature=0.0, ignore_eos=True)
    root = root_hash(engine.ready.fingerprint, cache_salt="warm-up")
    request = GenerateRequest("warm-up", pack_tokens([0] * tokens), sampling, root)
    engine.turn([Submit(request, Mode.LOCAL)])
    while engine.busy:
        engine.turn([])
    engine.turn([Flush()])
    engine.runner.work = Work()  # nobody asked for it


def describe(config: EngineConfig, model: HybridModel, arena: Arena, cache: Cache, link: Transport | None) -> Ready:
    """What the front needs to know of a loaded engine."""
    geometry = arena.geometry
    peer = None
    if link is not None:
        peer = PeerArena(
            worker_id=config.worker_id,
            incarnation=config.incarnation,
            generation=GENERATION,
            base_address=arena.base_address,
            total_bytes=geometry.total_bytes,
            block_bytes=geometry.block_bytes,
            slot_bytes=geometry.slot_bytes,
            blocks=geometry.blocks,
            slots=geometry.slots,
            memory="DRAM" if config.device == "cpu" else "VRAM",
            device_id=0 if config.device == "cpu" else torch.device(config.device).index or 0,
            agent_name=link.agent_name,
            agent_metadata=link.agent_metadata,
        )
    return Ready(
        model_id=model.layout.model_id,
        fingerprint=model.layout.fingerprint(),
        layout=model.layout.describe(),
        max_model_tokens=model.max_model_tokens,
        max_request_tokens=min(cache.max_request_tokens(), model.max_model_tokens),
        block_tokens=model.layout.block_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        groups=model.layout.groups,
        arena=peer,
        arena_bytes=geometry.total_bytes,
    )
