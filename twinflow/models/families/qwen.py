"""Qwen3.5 and Qwen3-Next, dense: three Gated DeltaNet layers to each gated attention layer, a SwiGLU after every mixer.

Vision-language checkpoints are loaded for their text part alone; multi-token-prediction heads are left out.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from twinflow.contracts.groups import CacheLayout
from twinflow.kernels.base import HeadNorm, KernelSet
from twinflow.kernels.rotary.frequencies import inverse_frequencies
from twinflow.models.families.base import LayoutOptions, hybrid_layout
from twinflow.models.families.qwen_config import FULL, QwenConfig
from twinflow.models.families.qwen_weights import attention_rows, sized_experts
from twinflow.models.layers.attention import Attention
from twinflow.models.layers.decoder import Decoder, ResidualBlock
from twinflow.models.layers.gated_delta import GatedDelta
from twinflow.models.layers.mlp import SwiGluMlp
from twinflow.models.layers.norm import UnitOffsetNorm
from twinflow.models.step import Mixer
from twinflow.models.weights import Weights, stacked

PREFIXES = ("model.", "model.language_model.")  # of text models, and of the text part of vision-language ones
IGNORED = ("mtp.", "model.visual.", "lm_head.weight")  # an unread lm_head.weight belongs to tied embeddings

DeltaRows = Callable[[Weights, str, QwenConfig], torch.Tensor]


@dataclass(frozen=True, slots=True)
class QwenFamily:
    """`delta_rows` reads the checkpoint's layout of Gated DeltaNet's input projection. `experts`: layers may be mixtures
    of experts, so what is built can be sized but not run."""

    delta_rows: DeltaRows
    experts: bool = False

    def facts(self, config: dict[str, Any]) -> dict[str, Any]:
        facts = asdict(QwenConfig.parse(config, experts=self.experts))
        return {key: value for key, value in facts.items() if value is not None}

    def layout(self, config: dict[str, Any], options: LayoutOptions, model_id: str) -> CacheLayout:
        c = QwenConfig.parse(config, experts=self.experts)
        return hybrid_layout(
            model_id,
            options,
            attention_layers=c.attention_layers,
            kv=(c.kv_heads, c.head_dim),
            state_layers=c.state_layers,
            temporal=(c.value_heads, c.value_dim, c.key_dim),
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
        c = QwenConfig.parse(config, experts=self.experts)
        prefix = next((p for p in PREFIXES if weights.has(f"{p}embed_tokens.weight")), PREFIXES[0])
        embedding = weights.take(f"{prefix}embed_tokens.weight", c.vocab_size, c.hidden)
        head = embedding if c.tied else weights.take("lm_head.weight", c.vocab_size, c.hidden)
        blocks: list[ResidualBlock] = []
        for layer in range(len(c.layer_types)):
            blocks += _layer(weights, f"{prefix}layers.{layer}", c, layer, kernels, self.delta_rows)
        norm = _norm(weights, f"{prefix}norm.weight", c.hidden, c, kernels)
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
            inv_freq=inverse_frequencies(c.rotary_dim, c.rope_theta, device),
        )


def _layer(
    weights: Weights, prefix: str, c: QwenConfig, layer: int, kernels: KernelSet, delta_rows: DeltaRows
) -> list[ResidualBlock]:
    """The two residual blocks of a layer: its mixer and its MLP."""
    mixer: Mixer
    if c.layer_types[layer] == FULL:
        mixer = _attention(weights, f"{prefix}.self_attn", c, c.attention_layers.index(layer), kernels)
    else:
        mixer = _gated_delta(weights, f"{prefix}.linear_attn", c, c.state_layers.index(layer), kernels, delta_rows)
    mlp: Mixer
    if c.experts and layer in c.experts.layers:
        mlp = sized_experts(weights, f"{prefix}.mlp", c, c.experts)
    else:
        mlp = _mlp(weights, f"{prefix}.mlp", c, kernels)
    return [
        ResidualBlock(_norm(weights, f"{prefix}.input_layernorm.weight", c.hidden, c, kernels), mixer),
        ResidualBlock(_norm(weights, f"{prefix}.post_attention_layernorm.weight", c.hidden, c, kernels), mlp),
    ]


def _mlp(weights: Weights, prefix: str, c: QwenConfig, kernels: KernelSet) -> SwiGluMlp:
    gate = weights.take(f"{prefix}.gate_proj.weight", c.intermediate, c.hidden)
    up = weights.take(f"{prefix}.up_proj.weight", c.intermediate, c.hidden)
    down = weights.take(f"{prefix}.down_proj.weight", c.hidden, c.intermediate)
    return SwiGluMlp(kernels, stacked([gate, up]), down)


def _norm(weights: Weights, name: str, size: int, c: QwenConfig, kernels: KernelSet) -> UnitOffsetNorm:
    return UnitOffsetNorm(kernels, weights.take(name, size), c.eps)


def _attention(weights: Weights, prefix: str, c: QwenConfig, index: int, kernels: KernelSet) -> Attention:
    return Attention(
        kernels=kernels,
        index=index,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        scale=c.head_dim**-0.5,
        gated=True,
        qkv=attention_rows(weights, prefix, c),
        out=weights.take(f"{prefix}.o_proj.weight", c.hidden, c.heads * c.head_dim),
        q_norm=HeadNorm(weights.take(f"{prefix}.q_norm.weight", c.head_dim), c.eps, unit_offset=True),
        k_norm=HeadNorm(weights.take(f"{prefix}.k_norm.weight", c.head_dim), c.eps, unit_offset=True),
    )


def _gated_delta(
    weights: Weights, prefix: str, c: QwenConfig, index: int, kernels: KernelSet, delta_rows: DeltaRows
) -> GatedDelta:
    conv = weights.take(f"{prefix}.conv1d.weight", c.conv_dim, 1, c.conv_width)
    return GatedDelta(
        kernels=kernels,
        index=index,
        key_heads=c.key_heads,
        value_heads=c.value_heads,
        key_dim=c.key_dim,
        value_dim=c.value_dim,
        eps=c.eps,
        in_proj=delta_rows(weights, prefix, c),
        conv=conv[:, 0].contiguous(),
        a_log=weights.take(f"{prefix}.A_log", c.value_heads, dtype=torch.float32),
        dt_bias=weights.take(f"{prefix}.dt_bias", c.value_heads, dtype=torch.float32),
        norm=weights.take(f"{prefix}.norm.weight", c.value_dim),
        out=weights.take(f"{prefix}.out_proj.weight", c.hidden, c.value_heads * c.value_dim),
    )
