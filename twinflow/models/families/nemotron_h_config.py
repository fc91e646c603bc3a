"""The facts of a Nemotron-H config, checked: everything that decides the model's results and its cache.

Layers come in two spellings, a list of names (`layers_block_type`, also `layer_types`) or a string of one letter each
(`hybrid_override_pattern`); some other keys have older names.
"""

from dataclasses import dataclass
from typing import Any

from twinflow.contracts.errors import ModelError, Unsupported
from twinflow.models.config import ConfigReader, refuse_quantised
from twinflow.models.families.experts import Experts

MAMBA, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}
LEGACY_TYPES = {"mamba": MAMBA, "attention": ATTENTION}
LISTS, PATTERN = ("layers_block_type", "layer_types"), "hybrid_override_pattern"
OLDER_KEYS = {
    "attention_head_dim": "head_dim",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_n_groups": "n_groups",
}


@dataclass(frozen=True, slots=True)
class NemotronHConfig:
    """Dims as `layers/` names them: H, P, G, N = mamba_heads, mamba_head_dim, groups, state_dim; W = conv_width.

    `intermediate` is of the dense MLP layers; `experts` None = all of them are."""

    vocab_size: int
    hidden: int
    intermediate: int
    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    mamba_heads: int
    mamba_head_dim: int
    groups: int
    state_dim: int
    conv_width: int
    conv_bias: bool
    eps: float
    tied: bool
    max_tokens: int
    experts: Experts | None = None

    @property
    def mamba_width(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        return self.mamba_width + 2 * self.groups * self.state_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.layer_types) if t == ATTENTION)

    @property
    def state_layers(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.layer_types) if t == MAMBA)

    @classmethod
    def parse(cls, config: dict[str, Any], *, experts: bool = False) -> "NemotronHConfig":
        """Reads a config.json. Layers that are mixtures of experts are refused unless `experts` says that they are only
        to be sized.

        Raises ModelError for missing or contradictory keys, Unsupported (by name) for features that are not built.
        """
        name = (config.get("architectures") or [config.get("model_type", "model")])[0]
        refuse_quantised(config, name)
        renamed = {new: config[old] for old, new in OLDER_KEYS.items() if config.get(old) is not None}
        read = ConfigReader(config | renamed, name)
        _refuse_features(read)
        layer_types = _layer_types(read, experts)
        parsed = cls(
            vocab_size=read.integer("vocab_size"),
            hidden=read.integer("hidden_size"),
            # A pattern without MLP layers needs no width for them.
            intermediate=read.integer("intermediate_size", None if MLP in layer_types else 1),
            layer_types=layer_types,
            heads=read.integer("num_attention_heads"),
            kv_heads=read.integer("num_key_value_heads"),
            head_dim=read.integer("head_dim", 128),
            mamba_heads=read.integer("mamba_num_heads"),
            mamba_head_dim=read.integer("mamba_head_dim"),
            groups=read.integer("n_groups"),
            state_dim=read.integer("ssm_state_size"),
            conv_width=read.integer("conv_kernel", 4),
            conv_bias=bool(read.values.get("use_conv_bias", True)),
            eps=read.number("layer_norm_epsilon", 1e-5),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_tokens=read.integer("max_position_embeddings"),
            experts=_experts(read, layer_types),
        )
        _check_heads(parsed, name)
        return parsed


def _refuse_features(read: ConfigReader) -> None:
    read.only("mlp_hidden_act", "relu2")
    read.only("mamba_hidden_act", "silu")
    for bias in ("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias"):
        read.only(bias, False)
    read.only("residual_in_fp32", False)
    read.only("sliding_window")
    _refuse_step_limits(read)


def _refuse_step_limits(read: ConfigReader) -> None:
    """The recurrence's step size is not clamped: limits other than (0, infinity) are refused.

    `time_step_min` and `time_step_max` only draw initial weights. (`transformers` 5.17 clamps to `time_step_min` too, but
    only where it processes several tokens at once, so its states depend on how a prompt is cut.)
    """
    limits = read.values.get("time_step_limit")
    if limits is None:
        return
    # JSON has no infinity: it is written as the number Infinity or, by `transformers` 5, as {"__float__": "Infinity"}.
    plain = [v.get("__float__") if isinstance(v, dict) else v for v in limits] if isinstance(limits, list) else limits
    if plain not in ([0, float("inf")], [0, "Infinity"]):
        raise Unsupported(
            f"{read.name}: time_step_limit={limits!r} is not supported (only 0 to infinity)", param="time_step_limit"
        )


def _experts(read: ConfigReader, layer_types: tuple[str, ...]) -> Experts | None:
    layers = tuple(i for i, kind in enumerate(layer_types) if kind == EXPERTS)
    if not layers:
        return None
    return Experts(
        layers=layers,
        count=read.integer("n_routed_experts"),
        active=read.integer("num_experts_per_tok"),
        intermediate=read.integer("moe_intermediate_size"),
        shared_intermediate=read.integer("moe_shared_expert_intermediate_size"),
        latent=read.integer("moe_latent_size") if read.values.get("moe_latent_size") else None,
    )


def _layer_types(read: ConfigReader, experts: bool) -> tuple[str, ...]:
    """One of MAMBA, ATTENTION, MLP and, where allowed, EXPERTS per layer, from whichever spelling the config has; where it
    has both, they agree."""
    key, types = _spelled_layers(read)
    layers = read.integer("num_hidden_layers", len(types))
    if len(types) != layers:
        raise ModelError(f"{read.name}: {key} has {len(types)} entries for num_hidden_layers={layers}")
    for i, kind in enumerate(types):
        if kind == EXPERTS and not experts:
            raise Unsupported(
                f"{read.name}: layer {i} is a mixture of experts, which is not supported; only dense models are",
                param=key,
            )
        if kind not in (MAMBA, ATTENTION, MLP, EXPERTS):
            raise Unsupported(f"{read.name}: layer {i} is of type {kind!r}, which is not supported", param=key)
    for kind, letter in ((MAMBA, "M"), (ATTENTION, "*")):
        if kind not in types:
            raise Unsupported(
                f"{read.name}: no layer is {kind!r} ({letter!r}); a hybrid model has both {MAMBA!r} and {ATTENTION!r}",
                param=key,
            )
    return types


def _spelled_layers(read: ConfigReader) -> tuple[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for key in LISTS:
        if read.values.get(key):
            found[key] = tuple(LEGACY_TYPES.get(t, t) for t in read.values[key])
    if read.values.get(PATTERN):
        found[PATTERN] = tuple(LETTERS.get(letter, letter) for letter in read.values[PATTERN])
    if not found:
        raise ModelError(f"{read.name}: config has neither {LISTS[0]!r} nor {PATTERN!r}")
    key, types = next(iter(found.items()))
    for other, others in found.items():
        if others != types:
            raise ModelError(f"{read.name}: {key} and {other} describe different layers")
    return key, types


def _check_heads(c: NemotronHConfig, name: str) -> None:
    for what, many, few in (
        ("num_attention_heads / num_key_value_heads", c.heads, c.kv_heads),
        ("mamba_num_heads / n_groups", c.mamba_heads, c.groups),
    ):
        if many % few:
            raise ModelError(f"{name}: {what} = {many} / {few} is no whole number")
    if c.conv_width < 2:
        raise ModelError(f"{name}: conv_kernel={c.conv_width} must be at least 2")
