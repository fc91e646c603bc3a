"""What a model will take on a device, from its config alone: its cache layout and its weights by name and shape.

The family's own `build` runs over tensors without bytes, so that what is counted here is what a loaded model holds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from twinflow.cache.arena import TORCH_DTYPES
from twinflow.contracts.errors import TwinflowError
from twinflow.contracts.groups import DTYPE_BYTES, CacheLayout
from twinflow.kernels.select import select_kernels
from twinflow.models.families import sized_families, supported_families
from twinflow.models.families.experts import SizedExperts
from twinflow.models.layers.decoder import Decoder
from twinflow.models.loader import family_of, layout_options
from twinflow.models.step import Mixer
from twinflow.models.weights import ShapeWeights, TensorShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`live_elements`: what the widest layer keeps per token while it runs, in elements of `dtype`. `refusal`: why such a
    model cannot be loaded yet, "" = it can."""

    architecture: str
    dtype: str
    layout: CacheLayout
    tensors: tuple[TensorShape, ...]
    vocab_size: int
    hidden: int
    max_model_tokens: int
    live_elements: int
    refusal: str

    @property
    def parameters(self) -> int:
        return sum(math.prod(t.shape) for t in self.tensors)

    def weights_bytes(self, dtype: str | None = None) -> int:
        """Of all tensors, in `dtype` (None: the model's) except for those that are always kept in another one."""
        size = DTYPE_BYTES[dtype or self.dtype]
        return sum(math.prod(t.shape) * (t.dtype.itemsize if t.dtype else size) for t in self.tensors)


def describe_model(
    config: dict[str, Any],
    *,
    dtype: str = "auto",
    block_tokens: int = 64,
    state_dtype: str = "float32",
    stored_dtype: str | None = None,
) -> ModelShape:
    """From a parsed config.json. `stored_dtype`: of the weights on disk, where known; it decides `dtype` "auto" when the
    config says nothing.

    Covers more than can be loaded: layers may be mixtures of experts. Raises ModelError or Unsupported as `load_model`
    does for everything else.
    """
    family = family_of(config, sized_families())
    options = layout_options(config, dtype, state_dtype, block_tokens, stored_dtype)
    layout = family.layout(config, options, "")
    weights = ShapeWeights(TORCH_DTYPES[options.dtype])
    # What a model computes for itself is small, so it may as well have bytes: on "meta", arithmetic costs what `stacked` says.
    with torch.inference_mode():
        model = family.build(config, weights, layout, (), select_kernels("cpu"), "cpu")
    assert isinstance(model, Decoder)
    return ModelShape(
        architecture=next(name for name in config["architectures"] if name in sized_families()),
        dtype=options.dtype,
        layout=layout,
        tensors=tuple(weights.taken),
        vocab_size=model.vocab_size,
        hidden=model.embedding.shape[1],
        max_model_tokens=model.max_model_tokens,
        live_elements=2 * model.embedding.shape[1] + max(_live(block.mixer) for block in model.blocks),
        refusal=_refusal(config),
    )


def by_kind(tensors: Iterable[TensorShape]) -> dict[tuple[str, tuple[int, ...], torch.dtype | None], int]:
    """How many tensors there are of one name (layer numbers as `*`), shape and dtype."""
    counts: dict[tuple[str, tuple[int, ...], torch.dtype | None], int] = {}
    for tensor in tensors:
        name = ".".join("*" if part.isdigit() else part for part in tensor.name.split("."))
        key = (name, tensor.shape, tensor.dtype)
        counts[key] = counts.get(key, 0) + 1
    return counts


def _live(mixer: Mixer) -> int:
    """Elements per token between a mixer's first input and its last output: the rows and columns of its matrices."""
    if isinstance(mixer, SizedExperts):
        return mixer.live
    values = (getattr(mixer, f.name) for f in fields(mixer))  # type: ignore[arg-type]  # mixers are dataclasses
    return sum(sum(v.shape) for v in values if isinstance(v, torch.Tensor) and v.ndim == 2)


def _refusal(config: dict[str, Any]) -> str:
    try:
        family_of(config, supported_families()).facts(config)
    except TwinflowError as error:
        return error.message
    return ""
