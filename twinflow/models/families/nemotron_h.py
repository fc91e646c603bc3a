"""Nemotron-H, dense: one mixer per layer, Mamba-2, attention without rotary embedding or a squared-ReLU MLP.

Multi-token-prediction heads are left out.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from twinflow.contracts.groups import CacheLayout
from twinflow.kernels.base import KernelSet
from twinflow.models.families.base import LayoutOptions, hybrid_layout
from twinflow.models.families.experts import Experts, SizedExperts
from twinflow.models.families.nemotron_h_config import ATTENTION, EXPERTS, MAMBA, NemotronHConfig
from twinflow.models.layers.attention import Attention
from twinflow.models.layers.decoder import Decoder, ResidualBlock
from twinflow.models.layers.mamba2 import Mamba2
from twinflow.models.layers.mlp import SquaredReluMlp
from twinflow.models.layers.norm import PlainNorm
from twinflow.models.step import Mixer
from twinflow.models.weights import Weights, stacked

PREFIXES = ("backbone.", "model.")  # on disk, and as `transformers` names its modules
IGNORED = ("mtp.",)
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class NemotronHFamily:
    """`NemotronHForCausalLM`. `experts`: layers may be mixtures of experts, so what is built can be sized but not run."""

    experts: bool = False

    def facts(self, config: dict[str, Any]) -> dict[str, Any]:
        facts = asdict(NemotronHConfig.parse(config, experts=self.experts))
        return {key: value for key, value in facts.items() if value is not None}

    def layout(self, config: dict[str, Any], options: LayoutOptions, model_id: str) -> CacheLayout:
        c = NemotronHConfig.parse(config, experts=self.experts)
        return hybrid_layout(
            model_id,
            options,
            attention_layers=c.attention_layers,
            kv=(c.kv_heads, c.head_dim),
            state_layers=c.state_layers,
            temporal=(c.mamba_heads, c.mamba_head_dim, c.state_dim),
            conv=(c.conv_dim, c.conv_width - 1),
        )

    def build(
        self,
        config: dict[str, Any],
        weights: Weights,
        layout: CacheLayout,
        eos_token_ids: tuple[int, ...],
        kernels: KernelSet,
        device: str,
    ) -> Decoder:
        c = NemotronHConfig.parse(config, experts=self.experts)
        prefix = next((p for p in PREFIXES if weights.has(f"{p}embeddings.weight")), PREFIXES[0])
        embedding = weights.take(f"{prefix}embeddings.weight", c.vocab_size, c.hidden)
        # A stored head counts even where the config says tied: `transformers` keeps both apart in this family.
        tied = c.tied and not weights.has(HEAD)
        head = embedding if tied else weights.take(HEAD, c.vocab_size, c.hidden)
        blocks = [_layer(weights, f"{prefix}layers.{layer}", c, layer, kernels) for layer in range(len(c.layer_types))]
        norm = PlainNorm(kernels, weights.take(f"{prefix}norm_f.weight", c.hidden), c.eps)
        weights.finish(IGNORED)
        return Decoder(
            layout=layout,
            vocab_size=c.vocab_size,
            max_model_tokens=c.max_tokens,
            eos_token_ids=eos_token_ids,
            kernels=kernels,
            embedding=embedding,
            blocks=tuple(blocks),
            norm=norm,
            head=head,
        )


def _layer(weights: Weights, prefix: str, c: NemotronHConfig, layer: int, kernels: KernelSet) -> ResidualBlock:
    mixer: Mixer
    kind = c.layer_types[layer]
    if kind == MAMBA:
        mixer = _mamba(weights, f"{prefix}.mixer", c, c.state_layers.index(layer), kernels)
    elif kind == ATTENTION:
        mixer = _attention(weights, f"{prefix}.mixer", c, c.attention_layers.index(layer), kernels)
    elif kind == EXPERTS and c.experts:
        mixer = _sized_experts(weights, f"{prefix}.mixer", c, c.experts)
    else:
        mixer = SquaredReluMlp(
            kernels=kernels,
            up=weights.take(f"{prefix}.mixer.up_proj.weight", c.intermediate, c.hidden),
            down=weights.take(f"{prefix}.mixer.down_proj.weight", c.hidden, c.intermediate),
        )
    return ResidualBlock(PlainNorm(kernels, weights.take(f"{prefix}.norm.weight", c.hidden), c.eps), mixer)


def _attention(weights: Weights, prefix: str, c: NemotronHConfig, index: int, kernels: KernelSet) -> Attention:
    width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
    rows = (("q", width), ("k", kv_width), ("v", kv_width))
    return Attention(
        kernels=kernels,
        index=index,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        scale=c.head_dim**-0.5,
        gated=False,
        qkv=stacked([weights.take(f"{prefix}.{part}_proj.weight", n, c.hidden) for part, n in rows]),
        out=weights.take(f"{prefix}.o_proj.weight", c.hidden, width),
    )


def _mamba(weights: Weights, prefix: str, c: NemotronHConfig, index: int, kernels: KernelSet) -> Mamba2:
    conv = weights.take(f"{prefix}.conv1d.weight", c.conv_dim, 1, c.conv_width)
    return Mamba2(
        kernels=kernels,
        index=index,
        heads=c.mamba_heads,
        head_dim=c.mamba_head_dim,
        groups=c.groups,
        state_dim=c.state_dim,
        eps=c.eps,
        in_proj=weights.take(f"{prefix}.in_proj.weight", c.mamba_width + c.conv_dim + c.mamba_heads, c.hidden),
        conv=conv[:, 0].contiguous(),
        conv_bias=weights.take(f"{prefix}.conv1d.bias", c.conv_dim) if c.conv_bias else None,
        a_log=weights.take(f"{prefix}.A_log", c.mamba_heads, dtype=torch.float32),
        dt_bias=weights.take(f"{prefix}.dt_bias", c.mamba_heads, dtype=torch.float32),
        skip=weights.take(f"{prefix}.D", c.mamba_heads, dtype=torch.float32),
        norm=weights.take(f"{prefix}.norm.weight", c.mamba_width),
        out=weights.take(f"{prefix}.out_proj.weight", c.hidden, c.mamba_width),
    )


def _sized_experts(weights: Weights, prefix: str, c: NemotronHConfig, e: Experts) -> SizedExperts:
    """Experts by fused names; checkpoints store each expert by itself, in the same bytes."""
    width = e.latent or c.hidden
    latent: tuple[torch.Tensor, ...] = ()
    if e.latent:
        latent = (
            weights.take(f"{prefix}.fc1_latent_proj.weight", e.latent, c.hidden),
            weights.take(f"{prefix}.fc2_latent_proj.weight", c.hidden, e.latent),
        )
    return SizedExperts(
        weights=(
            weights.take(f"{prefix}.gate.weight", e.count, c.hidden),
            weights.take(f"{prefix}.gate.e_score_correction_bias", e.count, dtype=torch.float32),
            weights.take(f"{prefix}.experts.up_proj.weight", e.count, e.intermediate, width),
            weights.take(f"{prefix}.experts.down_proj.weight", e.count, width, e.intermediate),
            weights.take(f"{prefix}.shared_experts.up_proj.weight", e.shared_intermediate, c.hidden),
            weights.take(f"{prefix}.shared_experts.down_proj.weight", c.hidden, e.shared_intermediate),
            *latent,
        ),
        live=e.active * 2 * (e.intermediate + width) + 2 * (e.shared_intermediate + c.hidden) + e.count,
    )
