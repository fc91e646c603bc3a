"""Puts one engine together from its settings; the only place where backends are chosen."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from twinflow.cache.arena import Arena
from twinflow.cache.base import Cache
from twinflow.cache.hybrid import HybridCache
from twinflow.cache.private import PrivateCache
from twinflow.contracts.errors import ModelError
from twinflow.contracts.hashing import pack_tokens, root_hash
from twinflow.contracts.requests import GenerateRequest, SamplingParams
from twinflow.contracts.workers import Role
from twinflow.engine.base import Flush, Mode, Ready, Submit, Work
from twinflow.engine.config import EngineConfig
from twinflow.engine.core import Engine
from twinflow.engine.guides import GuideReady, Guides, in_background
from twinflow.engine.memory_table import memory_lines
from twinflow.engine.sizing import device_memory, plan_worker
from twinflow.grammar.base import Compiler
from twinflow.grammar.cache import GrammarCache
from twinflow.grammar.llguidance import LlguidanceCompiler
from twinflow.models.base import HybridModel
from twinflow.models.checkpoint import read_json
from twinflow.models.hub import resolve_config
from twinflow.models.loader import load_model, random_model
from twinflow.transfer.base import PeerArena, TransferEvent, Transport
from twinflow.transfer.generations import RenewalLimits
from twinflow.transfer.paths import refuse_tcp
from twinflow.transfer.thread import TransferThread

log = logging.getLogger(__name__)

TransportFactory = Callable[[str, Arena], Transport]

FIRST_GENERATION = 1


def build_engine(
    config: EngineConfig, on_event: Callable[[TransferEvent | GuideReady], None], transport: TransportFactory | None
) -> tuple[Engine, Ready]:
    """Loads the model, allocates and registers the arena, warms up. Raises ModelError, or ValueError for a bad setting.

    `on_event` is called from threads of the engine. `transport` None = a worker that neither gives nor takes.
    """
    torch.set_num_threads(config.threads)
    if config.device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ModelError(f"device={config.device}: torch {torch.__version__} finds no GPU here", param="device")
        torch.cuda.set_device(torch.device(config.device).index or 0)  # kernels are launched on the current device
    shape, ask, capacity = plan_worker(config, device_memory(config.device))
    for line in memory_lines(shape, ask, capacity):
        log.info("%s", line)
    geometry = capacity.geometry
    config = replace(config, cache_bytes=geometry.total_bytes)
    model = _model(config)
    try:
        arena = Arena(model.layout, geometry, config.device)
    except MemoryError as error:
        raise ModelError(f"{error}; lower cache_bytes or utilisation", param="cache_bytes") from error
    cache = (HybridCache if config.prefix_cache else PrivateCache)(model.layout, geometry, arena)
    link, thread = open_transfer(config, arena, on_event, transport) if transport else (None, None)
    ready = describe(config, model, arena, cache, link)
    guides = Guides(
        in_background("grammars", lambda: grammar_compiler(config.model, model)),
        model.vocab_size,
        model.eos_token_ids,
        rows=config.max_running,
        device=config.device,
        threads=config.grammar_threads,
        done=on_event,
    )
    engine = Engine(config, model, arena, cache, thread, ready, guides)
    if config.device != "cpu":
        engine.runner.prepare(config)
    warm_up(engine)
    return engine, ready


def open_transfer(
    config: EngineConfig, arena: Arena, on_event: Callable[[TransferEvent], None], transport: TransportFactory
) -> tuple[Transport, TransferThread]:
    """The first generation's transport, and the thread that owns it and opens later ones."""

    def reopen(generation: int) -> Transport:
        return transport(f"{config.worker_id}/{config.incarnation}/{generation}", arena)

    link = reopen(FIRST_GENERATION)
    thread = TransferThread(
        link,
        on_event,
        reopen=reopen,
        limits=RenewalLimits(config.doomed_bytes, config.doomed_limit_s, config.generation_drain_s),
        serve=config.role is not Role.DECODE,
        path_rule=refuse_tcp if config.rdma_required else None,
    )
    return link, thread


def grammar_compiler(path_or_id: str, model: HybridModel) -> Compiler:
    """Over the tokenizer beside the model's config. Raises ModelError where there is none that can be used."""
    file = resolve_config(path_or_id).with_name("tokenizer.json")
    return GrammarCache(LlguidanceCompiler(file, model.vocab_size, model.eos_token_ids))


def _model(config: EngineConfig) -> HybridModel:
    """From its files, or with random weights of its config's shapes."""
    options: dict[str, Any] = {
        "dtype": config.dtype,
        "device": config.device,
        "block_tokens": config.block_tokens,
        "state_dtype": config.state_dtype,
        "attention": config.attention,
    }
    if config.load_format == "dummy":
        return random_model(read_json(resolve_config(config.model)), **options)
    return load_model(config.model, **options)


def warm_up(engine: Engine) -> None:
    """A prompt of a chunk and two tokens, so that no client pays for first calls; leaves the caches empty. On a GPU two prompts
    of two chunks, which no captured step takes: the library attends each, with a context and without."""
    many = 1 if engine.config.device == "cpu" else 2
    tokens = min(many * engine.config.chunk_tokens, engine.ready.max_request_tokens - 2)
    if tokens < 1:
        return
    sampling = SamplingParams(max_tokens=2, seed=0, temperature=0.0, ignore_eos=True)
    root = root_hash(engine.ready.fingerprint, cache_salt="warm-up")
    prompts = [pack_tokens([i] * tokens) for i in range(many)]
    engine.turn([Submit(GenerateRequest(f"warm-up {i}", p, sampling, root), Mode.LOCAL) for i, p in enumerate(prompts)])
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
            generation=FIRST_GENERATION,
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
