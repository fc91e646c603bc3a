"""What a family is: a pair of functions from a config to a cache layout and to a model."""

from dataclasses import dataclass
from typing import Any, Protocol

from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec, TensorSpec
from twinflow.kernels.base import KernelSet
from twinflow.models.base import HybridModel
from twinflow.models.weights import Weights


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """What the operator chooses about the cache. dtypes are names; `dtype` is the model's, for K, V and conv."""

    dtype: str
    state_dtype: str
    block_tokens: int


class Family(Protocol):
    """One architecture. Implementations are stateless; both methods refuse what they don't support by name."""

    def facts(self, config: dict[str, Any]) -> dict[str, Any]:
        """Everything of the config that changes the model's results, as plain JSON values; part of its identity."""
        ...

    def layout(self, config: dict[str, Any], options: LayoutOptions, model_id: str) -> CacheLayout:
        """The cache layout, from the config alone. Raises ModelError or Unsupported."""
        ...

    def build(
        self,
        config: dict[str, Any],
        weights: Weights,
        layout: CacheLayout,
        eos_token_ids: tuple[int, ...],
        kernels: KernelSet,
        device: str,
    ) -> HybridModel:
        """Takes the weights and assembles the model. Raises ModelError or Unsupported."""
        ...


def hybrid_layout(
    model_id: str,
    options: LayoutOptions,
    *,
    attention_layers: tuple[int, ...],
    kv: tuple[int, int],
    state_layers: tuple[int, ...],
    temporal: tuple[int, ...],
    conv: tuple[int, int],
) -> CacheLayout:
    """One group of attention layers, `kv` = (kv heads, head dim), and one of layers with a temporal and a conv state, of
    these shapes per sequence."""
    attention = GroupSpec(
        name="attention",
        kind=GroupKind.ATTENTION,
        layer_ids=attention_layers,
        tensors=(TensorSpec("k", kv, options.dtype), TensorSpec("v", kv, options.dtype)),
        block_tokens=options.block_tokens,
    )
    state = GroupSpec(
        name="state",
        kind=GroupKind.STATE,
        layer_ids=state_layers,
        tensors=(TensorSpec("temporal", temporal, options.state_dtype), TensorSpec("conv", conv, options.dtype)),
    )
    return CacheLayout(model_id, (attention, state))
