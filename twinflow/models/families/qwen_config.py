"""The facts of a Qwen3.5 or Qwen3-Next config, checked: everything that decides the model's results and its cache."""

from dataclasses import dataclass
from typing import Any

from twinflow.contracts.errors import ModelError, Unsupported
from twinflow.models.config import ConfigReader, refuse_quantised
from twinflow.models.families.experts import Experts

LINEAR, FULL = "linear_attention", "full_attention"
LEGACY_TYPES = {"mamba": LINEAR, "attention": FULL}


@dataclass(frozen=True, slots=True)
class QwenConfig:
    """Dims as `layers/` names them: Hk, Hv = key_heads, value_heads; K, V = key_dim, value_dim; W = conv_width.

    `intermediate` is of the dense layers; `experts` None = all layers are."""

    vocab_size: int
    hidden: int
    intermediate: int
    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    eps: float
    tied: bool
    max_tokens: int
    experts: Experts | None = None

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.layer_types) if t == FULL)

    @property
    def state_layers(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.layer_types) if t == LINEAR)

    @classmethod
    def parse(cls, config: dict[str, Any], *, experts: bool = False) -> "QwenConfig":
        """Reads a whole config.json (text models and the text part of vision-language ones). Layers that are mixtures of
        experts are refused unless `experts` says that they are only to be sized.

        Raises ModelError for missing or contradictory keys, Unsupported (by name) for features that are not built.
        """
        name = (config.get("architectures") or [config.get("model_type", "model")])[0]
        refuse_quantised(config, name)
        text = config.get("text_config") or config
        read = ConfigReader(text, name)
        _refuse_features(read)
        layers = read.integer("num_hidden_layers")
        mixed = _experts(read, layers)
        if mixed and not experts:
            raise Unsupported(
                f"{name}: layer {mixed.layers[0]} is a mixture of experts (num_experts={mixed.count}), "
                "which is not supported; only dense models are",
                param="num_experts",
            )
        head_dim = read.integer("head_dim", 256)
        rotary_dim, theta = _rope(read, head_dim)
        parsed = cls(
            vocab_size=read.integer("vocab_size"),
            hidden=read.integer("hidden_size"),
            # A model of experts alone has no dense layer to give a width to.
            intermediate=read.integer("intermediate_size", 1 if mixed and len(mixed.layers) == layers else None),
            layer_types=_layer_types(read, layers),
            heads=read.integer("num_attention_heads"),
            kv_heads=read.integer("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=theta,
            key_heads=read.integer("linear_num_key_heads"),
            value_heads=read.integer("linear_num_value_heads"),
            key_dim=read.integer("linear_key_head_dim"),
            value_dim=read.integer("linear_value_head_dim"),
            conv_width=read.integer("linear_conv_kernel_dim", 4),
            eps=read.number("rms_norm_eps", 1e-6),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            max_tokens=read.integer("max_position_embeddings"),
            experts=mixed,
        )
        _check_heads(parsed, name)
        return parsed


def _refuse_features(read: ConfigReader) -> None:
    read.only("hidden_act", "silu")
    read.only("attention_bias", False)
    read.only("mlp_bias", False)
    read.only("attn_output_gate", True)
    read.only("output_gate_type", "swish", "silu")
    read.only("use_sliding_window", False)
    read.only("sliding_window")


def _experts(read: ConfigReader, layers: int) -> Experts | None:
    """A layer is a mixture of experts unless it is listed in mlp_only_layers or skipped by decoder_sparse_step."""
    if not read.values.get("num_experts"):
        return None
    dense = set(read.values.get("mlp_only_layers") or [])
    every = read.integer("decoder_sparse_step", 1)
    sparse = tuple(i for i in range(layers) if i not in dense and (i + 1) % every == 0)
    if not sparse:
        return None
    return Experts(
        layers=sparse,
        count=read.integer("num_experts"),
        active=read.integer("num_experts_per_tok", 1),
        intermediate=read.integer("moe_intermediate_size", 1),
        shared_intermediate=read.integer("shared_expert_intermediate_size", 1),
    )


def _rope(read: ConfigReader, head_dim: int) -> tuple[int, float]:
    """(rotary_dim, theta) from `rope_parameters`, or from the older `rope_scaling`, `rope_theta` and
    `partial_rotary_factor`. For text, interleaved multimodal sections are equal to plain rotary embedding."""
    values = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
    values |= {k: read.values[k] for k in values if read.values.get(k) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        values |= {k: v for k, v in (read.values.get(key) or {}).items() if v is not None}
    rope = ConfigReader(values, read.name)
    rope.only("rope_type", "default")
    rope.only("type", "default", "mrope")
    return int(head_dim * rope.number("partial_rotary_factor", 0.25)), rope.number("rope_theta", 1e4)


def _layer_types(read: ConfigReader, layers: int) -> tuple[str, ...]:
    types = read.values.get("layer_types")
    if types is None:
        every = read.integer("full_attention_interval", 4)
        types = [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    types = tuple(LEGACY_TYPES.get(t, t) for t in types)
    if len(types) != layers:
        raise ModelError(f"{read.name}: layer_types has {len(types)} entries for num_hidden_layers={layers}")
    for i, kind in enumerate(types):
        if kind not in (LINEAR, FULL):
            raise Unsupported(
                f"{read.name}: layer {i} is of type {kind!r}, which is not supported", param="layer_types"
            )
    if len(set(types)) < 2:
        raise Unsupported(
            f"{read.name}: all layers are {types[0]!r}; a hybrid model has both {LINEAR!r} and {FULL!r}",
            param="layer_types",
        )
    return types


def _check_heads(c: QwenConfig, name: str) -> None:
    for what, many, few in (
        ("num_attention_heads / num_key_value_heads", c.heads, c.kv_heads),
        ("linear_num_value_heads / linear_num_key_heads", c.value_heads, c.key_heads),
    ):
        if many % few:
            raise ModelError(f"{name}: {what} = {many} / {few} is no whole number")
    if c.rotary_dim % 2 or not 0 < c.rotary_dim <= c.head_dim:
        raise ModelError(f"{name}: rotary dim {c.rotary_dim} must be even and within head_dim={c.head_dim}")
    if c.conv_width < 2:
        raise ModelError(f"{name}: linear_conv_kernel_dim={c.conv_width} must be at least 2")
