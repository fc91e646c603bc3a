"""Entry point: from a folder or hub id to a model, and from a config alone to its cache layout.

`load_model`: resolve folder → open checkpoint → choose family → describe layout → take weights → model.
"""

import hashlib
import json
from typing import Any

import torch

from twinflow.cache.arena import TORCH_DTYPES
from twinflow.contracts.errors import ModelError, Unsupported
from twinflow.contracts.groups import DTYPE_BYTES, CacheLayout
from twinflow.kernels.select import select_kernels
from twinflow.models.base import HybridModel
from twinflow.models.checkpoint import Checkpoint
from twinflow.models.config import eos_token_ids, resolve_dtype
from twinflow.models.families import supported_families
from twinflow.models.families.base import Family, LayoutOptions
from twinflow.models.hub import resolve_folder
from twinflow.models.weights import CheckpointWeights, RandomWeights


def load_model(
    path_or_id: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    block_tokens: int = 64,
    state_dtype: str = "float32",
    attention: str = "auto",
) -> HybridModel:
    """Loads a model from a Hugging Face folder or hub id.

    dtype: "auto" (as the config says, else as stored), "float32", "bfloat16" or "float16": of weights, activations, K/V
    and conv states. state_dtype: of temporal states. attention: as `select_kernels` has it. Raises ModelError for a missing
    folder, an unsupported architecture and missing or misshapen tensors; Unsupported, by name, for features that are not
    built (experts, quantised weights).
    """
    checkpoint = Checkpoint.open(resolve_folder(path_or_id))
    config = checkpoint.config
    family = family_of(config, supported_families())
    options = layout_options(config, dtype, state_dtype, block_tokens, checkpoint.main_dtype)
    layout = family.layout(config, options, _model_id(family, config, checkpoint))
    weights = CheckpointWeights(checkpoint, TORCH_DTYPES[options.dtype], device)
    eos = eos_token_ids(config, checkpoint.generation_config)
    with torch.inference_mode():
        kernels = select_kernels(device, attention, layout.attention.tensors[0].shape[-1])
        return family.build(config, weights, layout, eos, kernels, device)


def describe_layout(
    config: dict[str, Any],
    *,
    dtype: str = "auto",
    block_tokens: int = 64,
    state_dtype: str = "float32",
    model_id: str = "",
) -> CacheLayout:
    """The cache layout of a parsed config.json, without weights; the same as a loaded model's except for `model_id`.

    Raises ModelError or Unsupported as `load_model` does.
    """
    options = layout_options(config, dtype, state_dtype, block_tokens, None)
    return family_of(config, supported_families()).layout(config, options, model_id)


def random_model(
    config: dict[str, Any],
    *,
    dtype: str = "auto",
    device: str = "cpu",
    block_tokens: int = 64,
    state_dtype: str = "float32",
    attention: str = "auto",
    seed: int = 0,
) -> HybridModel:
    """A model of this config with seeded random weights: for measuring without a checkpoint. Its text is noise."""
    family = family_of(config, supported_families())
    options = layout_options(config, dtype, state_dtype, block_tokens, None)
    facts = json.dumps(family.facts(config), sort_keys=True)
    model_id = hashlib.blake2b(f"random {seed} {facts}".encode(), digest_size=16).hexdigest()
    layout = family.layout(config, options, model_id)
    weights = RandomWeights(TORCH_DTYPES[options.dtype], device, seed)
    with torch.inference_mode():
        kernels = select_kernels(device, attention, layout.attention.tensors[0].shape[-1])
        return family.build(config, weights, layout, eos_token_ids(config, {}), kernels, device)


def family_of(config: dict[str, Any], families: dict[str, Family]) -> Family:
    """The one of `families` that `architectures` names. Raises ModelError listing them."""
    names = config.get("architectures") or []
    for name in names:
        if name in families:
            return families[name]
    asked = ", ".join(names) or f"none named (model_type {config.get('model_type')!r})"
    raise ModelError(f"architecture {asked} is not supported; supported: {', '.join(sorted(families))}")


def layout_options(
    config: dict[str, Any], dtype: str, state_dtype: str, block_tokens: int, stored: str | None
) -> LayoutOptions:
    """`stored`: the dtype of the weights on disk, where known. Raises ModelError or Unsupported."""
    if state_dtype not in DTYPE_BYTES:
        raise Unsupported(f"state_dtype {state_dtype!r} is not supported (only {', '.join(DTYPE_BYTES)})")
    if block_tokens < 1:
        raise ModelError(f"block_tokens={block_tokens} must be at least 1")
    return LayoutOptions(resolve_dtype(dtype, config, stored), state_dtype, block_tokens)


def _model_id(family: Family, config: dict[str, Any], checkpoint: Checkpoint) -> str:
    """Identity of what the model computes: the config's facts and the weights' content, not where they lie."""
    facts = json.dumps(family.facts(config), sort_keys=True)
    return hashlib.blake2b(f"{facts} {checkpoint.content_digest()}".encode(), digest_size=16).hexdigest()
