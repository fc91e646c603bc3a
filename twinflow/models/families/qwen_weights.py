"""Weights of one Qwen layer by checkpoint name, rearranged once into the layout that `layers/` runs.

Both checkpoint layouts of Gated DeltaNet's input projection end up as rows [q | k | v | z | b | a] with heads in order.
"""

import torch

from twinflow.models.families.experts import Experts, SizedExperts
from twinflow.models.families.qwen_config import QwenConfig
from twinflow.models.weights import Weights, stacked


def separate_delta(weights: Weights, prefix: str, c: QwenConfig) -> torch.Tensor:
    """Qwen3.5: `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`, each flat with heads in order."""
    rows = (("qkv", c.conv_dim), ("z", c.value_heads * c.value_dim), ("b", c.value_heads), ("a", c.value_heads))
    return stacked([weights.take(f"{prefix}.in_proj_{part}.weight", n, c.hidden) for part, n in rows])


def interleaved_delta(weights: Weights, prefix: str, c: QwenConfig) -> torch.Tensor:
    """Qwen3-Next: `in_proj_qkvz` groups rows by key head as [q | k | v of its value heads | z of them], `in_proj_ba` as
    [b | a] of them."""
    r = c.value_heads // c.key_heads
    sizes = [c.key_dim, c.key_dim, r * c.value_dim, r * c.value_dim]
    qkvz = weights.take(f"{prefix}.in_proj_qkvz.weight", c.key_heads * sum(sizes), c.hidden)
    ba = weights.take(f"{prefix}.in_proj_ba.weight", 2 * c.value_heads, c.hidden)
    parts = qkvz.view(c.key_heads, sum(sizes), c.hidden).split(sizes, dim=1)
    parts += ba.view(c.key_heads, 2 * r, c.hidden).split([r, r], dim=1)
    return stacked([p.reshape(-1, c.hidden) for p in parts])


def attention_rows(weights: Weights, prefix: str, c: QwenConfig) -> torch.Tensor:
    """[q | gate | k | v]; the checkpoint's `q_proj` holds [q | gate] per head."""
    width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
    q_gate = weights.take(f"{prefix}.q_proj.weight", 2 * width, c.hidden)
    q, gate = q_gate.view(c.heads, 2, c.head_dim, c.hidden).unbind(1)
    k = weights.take(f"{prefix}.k_proj.weight", kv_width, c.hidden)
    v = weights.take(f"{prefix}.v_proj.weight", kv_width, c.hidden)
    return stacked([q.reshape(width, c.hidden), gate.reshape(width, c.hidden), k, v])


def sized_experts(weights: Weights, prefix: str, c: QwenConfig, e: Experts) -> SizedExperts:
    """Fused names (`gate_up_proj`, `down_proj` over all experts); checkpoints that store each expert by itself hold the
    same bytes."""
    shared = ("gate", e.shared_intermediate, c.hidden), ("up", e.shared_intermediate, c.hidden)
    return SizedExperts(
        weights=(
            weights.take(f"{prefix}.gate.weight", e.count, c.hidden),
            weights.take(f"{prefix}.experts.gate_up_proj", e.count, 2 * e.intermediate, c.hidden),
            weights.take(f"{prefix}.experts.down_proj", e.count, c.hidden, e.intermediate),
            *(weights.take(f"{prefix}.shared_expert.{part}_proj.weight", *shape) for part, *shape in shared),
            weights.take(f"{prefix}.shared_expert.down_proj.weight", c.hidden, e.shared_intermediate),
            weights.take(f"{prefix}.shared_expert_gate.weight", 1, c.hidden),
        ),
        live=e.active * (3 * e.intermediate + 2 * c.hidden) + 3 * e.shared_intermediate + 2 * c.hidden + e.count,
    )
