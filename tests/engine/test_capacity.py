"""Invariant 6 for `plan`: what it tells is what a worker's pools hold, and for the reference models what they should."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models.tiny import FAMILIES, make_checkpoint, save
from twinflow.cache.arena import Arena, ArenaGeometry
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.errors import BadRequest, ModelError, TooLong, Unsupported
from twinflow.contracts.hashing import TokenChain, root_hash
from twinflow.contracts.workers import Role
from twinflow.engine.build import build_engine
from twinflow.engine.capacity import Ask, Bound, Capacity, Lengths, plan_capacity, plan_workspace
from twinflow.engine.config import EngineConfig
from twinflow.models.checkpoint import Checkpoint
from twinflow.models.loader import describe_layout, load_model
from twinflow.models.shape import ModelShape, describe_model

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
GIB = 1 << 30

# Bytes of KV per token, of a state per sequence, and parameters of the text model in billions.
REFERENCE = {
    "qwen3.5-0.8b": (12_288, 19_537_920, 0.752),
    "qwen3.5-4b": (32_768, 51_511_296, 4.206),
    "qwen3.5-27b": (65_536, 153_944_064, 26.896),
    "qwen3.5-35b-a3b": (20_480, 64_389_120, 34.661),
    "nemotron-3-nano-4b": (16_384, 83_801_088, 3.974),
    "nemotron-nano-9b-v2": (16_384, 143_548_416, 8.888),
}
FIT_24_GIB = ("qwen3.5-0.8b", "qwen3.5-4b", "nemotron-3-nano-4b")  # with 32 running requests


def config(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def shape(name: str, **options: Any) -> ModelShape:
    return describe_model(config(name), **options)


def on_24_gib(name: str, **changes: Any) -> Capacity:
    return plan_capacity(shape(name), Ask(**{"role": Role.BOTH, "max_running": 32, "device_bytes": 24 * GIB} | changes))


# ---- the reference models ----


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_sizes(name: str) -> None:
    token_bytes, state_bytes, billions = REFERENCE[name]
    s = shape(name)
    assert s.dtype == "bfloat16"
    assert s.layout.block_bytes == 64 * token_bytes
    assert s.layout.slot_bytes == state_bytes
    assert round(s.parameters / 1e9, 3) == billions
    assert s.weights_bytes("float32") == 4 * s.parameters
    # What is always kept in fp32: decays and step biases, and D of Mamba-2.
    assert 0 < s.weights_bytes() - 2 * s.parameters < 100_000


def test_every_example_config_is_a_reference() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(REFERENCE)


@pytest.mark.parametrize("name", REFERENCE)
def test_layouts_are_those_of_loaded_models(name: str) -> None:
    s = shape(name)
    if name == "qwen3.5-35b-a3b":
        assert "Qwen3_5MoeForConditionalGeneration is not supported" in s.refusal
    else:
        assert s.refusal == ""
        assert describe_layout(config(name)) == s.layout


@pytest.mark.parametrize("name", FIT_24_GIB)
def test_capacity_on_24_gib(name: str) -> None:
    """At least 97 % of what is left beside 32 slots, in tokens."""
    c = on_24_gib(name)
    ideal = (c.geometry.total_bytes - 32 * c.layout.slot_bytes) / c.token_bytes
    assert 0.97 * ideal <= c.capacity_tokens <= ideal
    assert c.weights_bytes + c.workspace_bytes + c.geometry.total_bytes <= 0.9 * 24 * GIB


@pytest.mark.parametrize(
    ("name", "published_tokens", "slots"),
    [("qwen3.5-0.8b", 1_094_912, 300), ("nemotron-3-nano-4b", 100_768, 145)],
    ids=str,
)
def test_more_tokens_than_published_pools(name: str, published_tokens: int, slots: int) -> None:
    assert on_24_gib(name).capacity_tokens > published_tokens
    assert on_24_gib(name, max_running=slots).capacity_tokens > published_tokens


def test_cost_of_one_token_on_qwen_4b() -> None:
    cost = on_24_gib("qwen3.5-4b").request(1)
    assert (cost.blocks, cost.slots) == (1, 1)
    assert cost.size_bytes == 51_511_296 + 2 * (1 << 20)


@pytest.mark.parametrize("name", FIT_24_GIB)
def test_any_split_uses_the_arena(name: str) -> None:
    """From 32 slots to nothing but slots, wherever the boundary is and wherever it is put at the start."""
    c = on_24_gib(name)
    g = c.geometry
    for slots in range(g.slot_floor, g.slots + 1):
        assert c.unused_beside(slots) <= 0.01 * g.total_bytes
    for slots in range(32, (g.total_bytes - g.block_bytes) // g.slot_bytes + 1):
        split = ArenaGeometry.split(c.layout, g.total_bytes, slots)
        used = split.blocks * split.block_bytes + split.slot_floor * split.slot_bytes
        assert used >= 0.99 * g.total_bytes


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(ModelError, match=r"32 slots of 143,548,416 B .* room for 29 slots; .* fewer running"):
        on_24_gib("nemotron-nano-9b-v2")
    assert on_24_gib("nemotron-nano-9b-v2", max_running=16).capacity_tokens > 0
    with pytest.raises(ModelError, match=r"room for 0 slots; it takes a device of (\d+) GiB$") as caught:
        on_24_gib("qwen3.5-27b")
    gib = int(str(caught.value).split()[-2])
    assert on_24_gib("qwen3.5-27b", device_bytes=gib * GIB).capacity_tokens > 0
    with pytest.raises(ModelError):
        on_24_gib("qwen3.5-27b", device_bytes=(gib - 1) * GIB)


# ---- weights ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_are_those_on_disk_and_in_memory(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_checkpoint(tmp_path, family, 0, tie_word_embeddings=tied)
    checkpoint = Checkpoint.open(folder)
    stored = {
        name.replace("model.language_model.", "model."): e.shape
        for name, e in checkpoint.tensors.items()
        if not name.startswith("model.visual.")
    }
    s = describe_model(checkpoint.config)
    if family == "nemotron_h":
        stored = {name.replace("model.", "backbone.", 1): shape for name, shape in stored.items()}
        if tied:  # this family's checkpoints keep a head of their own; a config cannot tell
            stored.pop("lm_head.weight", None)
    assert {t.name: t.shape for t in s.tensors} == stored
    loaded = load_model(str(folder))
    assert loaded.layout.groups == s.layout.groups
    if not (family == "nemotron_h" and tied):
        storages = {t.data_ptr(): t.numel() * t.element_size() for t in tensors_of(loaded)}
        assert sum(storages.values()) == s.weights_bytes()


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Weights of a loaded model, however deep; not what is computed from its config."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from tensors_of(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in ("kernels", "layout", "inv_freq"):
                yield from tensors_of(getattr(value, field.name))


TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
TINY_QWEN = TINY | {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "num_experts": 8,
    "shared_expert_intermediate_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
TINY_NEMOTRON = TINY | {
    "mamba_num_heads": 6,
    "mamba_head_dim": 24,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "moe_shared_expert_intermediate_size": 48,
}
EXPERTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", TINY_QWEN),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", TINY_QWEN | {"mlp_only_layers": [1]}),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig", TINY_NEMOTRON | {"hybrid_override_pattern": "M-M*-ME"}),
    "nemotron_h_latent": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        TINY_NEMOTRON | {"hybrid_override_pattern": "ME*EM", "moe_latent_size": 40},
    ),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_sized_but_not_loaded(tmp_path: Path, family: str) -> None:
    model, text_config, values = EXPERTS[family]
    transformers.logging.set_verbosity_error()
    save(getattr(transformers, model)(getattr(transformers, text_config)(**values)), tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    s = describe_model(checkpoint.config)
    assert s.weights_bytes() == sum(e.end - e.start for e in checkpoint.tensors.values())
    assert s.refusal
    with pytest.raises((Unsupported, ModelError)) as caught:
        load_model(str(tmp_path))
    assert s.refusal == caught.value.message


# ---- the same numbers in a worker ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("cache_bytes", "running", "checkpoints", "block_tokens"),
    [(8 << 20, 4, 4, 64), (3_000_001, 3, 0, 16), (1 << 20, 1, 2, 8)],
    ids=str,
)
def test_a_worker_holds_what_was_planned(
    tmp_path: Path, family: str, cache_bytes: int, running: int, checkpoints: int, block_tokens: int
) -> None:
    folder = make_checkpoint(tmp_path, family, 0)
    settings: dict[str, Any] = {
        "role": Role.BOTH,
        "cache_bytes": cache_bytes,
        "max_running": running,
        "checkpoint_slots": checkpoints,
    }
    planned = plan_capacity(describe_model(Checkpoint.open(folder).config, block_tokens=block_tokens), Ask(**settings))
    engine, ready = build_engine(
        EngineConfig(
            model=str(folder), worker_id="w", incarnation="i", block_tokens=block_tokens, transport="none", **settings
        ),
        on_event=lambda done: None,
        transport=None,
    )
    assert isinstance(engine.cache, HybridCache)
    assert engine.cache.geometry == planned.geometry
    assert ready.groups == planned.layout.groups
    assert ready.arena_bytes == planned.geometry.total_bytes
    assert ready.max_request_tokens == planned.max_request_tokens
    assert engine.cache.max_request_tokens() == planned.capacity_tokens
    assert planned.geometry.slot_floor >= running + checkpoints
    engine.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3_5", 0)
    return describe_model(Checkpoint.open(folder).config)


def planned(tiny: ModelShape, **changes: Any) -> Capacity:
    return plan_capacity(tiny, Ask(**{"role": Role.BOTH, "max_running": 4, "cache_bytes": 4 << 20} | changes))


@pytest.mark.parametrize("tokens", [1, 64, 65, 200, 500, 1000, 2000])
def test_so_many_run_at_once(tiny: ModelShape, tokens: int) -> None:
    """The pools give out as many requests as planned; where blocks bound them, not one more."""
    c = planned(tiny)
    cost = c.request(tokens)
    cache = HybridCache(c.layout, c.geometry, Arena(c.layout, c.geometry))
    fingerprint = c.layout.fingerprint()
    held = []
    for i in range(cost.at_once + 1):
        chain = TokenChain(root_hash(fingerprint, cache_salt=str(i)), c.layout.block_tokens, b"")
        chain.append([7])
        holding = cache.reserve(chain, tokens)
        if holding is not None:
            held.append(holding)
            assert len(holding.blocks) == cost.blocks
    assert len(held) >= cost.at_once
    if cost.bound is Bound.ATTENTION:
        assert len(held) == cost.at_once < c.max_running
    else:
        assert cost.at_once == c.max_running
    with pytest.raises(TooLong):
        cache.reserve(chain, c.capacity_tokens + 1)


def test_the_bound_is_where_it_is_said_to_be(tiny: ModelShape) -> None:
    c = planned(tiny)
    at = c.all_running_tokens
    assert c.request(at).bound is Bound.STATE
    assert c.request(at).at_once == c.max_running
    assert c.request(at + 1).bound is Bound.ATTENTION
    assert c.request(at + 1).at_once < c.max_running
    too_long = c.request(c.max_model_tokens + 1)
    assert (too_long.at_once, too_long.bound) == (0, Bound.MODEL)


@pytest.mark.parametrize("tokens", [1, 64, 200, 500, 1000])
@pytest.mark.parametrize("checkpoints", [0, 5, 40])
def test_running_and_cached_fit_together(tiny: ModelShape, tokens: int, checkpoints: int) -> None:
    c = planned(tiny, checkpoint_slots=checkpoints)
    cost = c.request(tokens)
    both = cost.at_once + cost.cached
    assert both <= c.geometry.slots
    assert both * cost.blocks <= c.geometry.blocks_beside(max(both, c.geometry.slot_floor))
    more = both + 1
    fits = more * cost.blocks <= c.geometry.blocks_beside(max(more, c.geometry.slot_floor))
    assert more > c.geometry.slots or not fits
    assert cost.at_once <= c.at_most(tokens)


def test_roles_decide_reserves() -> None:
    s = shape("qwen3.5-4b")
    terms = {}
    for role in Role:
        ask = Ask(role=role, max_running=32, device_bytes=24 * GIB)
        terms[role] = {t.name: t.size_bytes for t in plan_workspace(s, ask)}
    assert "decode graphs" not in terms[Role.PREFILL]
    assert terms[Role.DECODE] == terms[Role.BOTH]
    assert on_24_gib("qwen3.5-4b", role=Role.PREFILL).capacity_tokens > on_24_gib("qwen3.5-4b").capacity_tokens
    lengths = Lengths(1000, 200)
    assert {role: lengths.held_tokens(role) for role in Role} == {
        Role.PREFILL: 1000,
        Role.DECODE: 1200,
        Role.BOTH: 1200,
    }


def test_dtypes_change_what_they_name(tiny: ModelShape) -> None:
    wide, narrow = shape("qwen3.5-4b"), shape("qwen3.5-4b", state_dtype="bfloat16")
    assert narrow.layout.slot_bytes < wide.layout.slot_bytes / 1.9
    assert narrow.layout.block_bytes == wide.layout.block_bytes
    full = shape("qwen3.5-4b", dtype="float32")
    assert full.weights_bytes() == wide.weights_bytes("float32") == 4 * wide.parameters
    assert full.layout.block_bytes == 2 * wide.layout.block_bytes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device_bytes": GIB}, "either the device's bytes or the cache's"),
        ({"cache_bytes": None}, "either the device's bytes or the cache's"),
        ({"max_running": 0}, "max_running must be at least 1, got 0"),
        ({"step_tokens": 0}, "step_tokens must be at least 1"),
        ({"checkpoint_slots": -1}, "checkpoint_slots must be 0 or more"),
        ({"utilisation": 1.1}, "utilisation 1.1 must be above 0 and at most 1"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_asks_that_cannot_be(tiny: ModelShape, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        planned(tiny, **changes)


def test_a_cache_without_room(tiny: ModelShape) -> None:
    with pytest.raises(ModelError, match="too small"):
        planned(tiny, cache_bytes=1000)
