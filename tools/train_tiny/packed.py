"""Keeps chats that share a row apart: convolution, recurrent state and attention all restart with `position`.

transformers' Qwen3.5 layers call two functions of their module; `install` replaces those for training.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from tools.train_tiny.recurrence import Rule


@dataclass(slots=True)
class Packing:
    """Where chats begin in the rows of the present step: `position` (rows, tokens) is set before each forward."""

    position: Tensor

    def attention_mask(self) -> Tensor:
        """(rows, 1, tokens, tokens), True where a query may look: same chat, not later."""
        n = self.position.shape[1]
        chat = (self.position == 0).cumsum(1)
        causal = torch.ones(n, n, dtype=torch.bool, device=chat.device).tril()
        return ((chat[:, :, None] == chat[:, None, :]) & causal)[:, None]


def convolve(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """SiLU of the causal depthwise convolution of x (rows, channels, tokens); taps before a chat count as zero."""
    x = x.transpose(1, 2)
    width = weight.shape[-1]
    out = x * weight[:, -1]
    for back in range(1, width):
        inside = (position >= back)[..., None]
        out = out + torch.where(inside, torch.roll(x, back, 1), 0) * weight[:, width - 1 - back]
    return F.silu(out).to(x.dtype).transpose(1, 2)


def install(packing: Packing, rule: Rule, compile_convolution: bool) -> None:
    conv = torch.compile(convolve, dynamic=False) if compile_convolution else convolve

    def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: None = None, activation: str = "silu", **_: object) -> Tensor:
        return conv(x, weight, packing.position)

    def chunk_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        return rule(q, k, v, g, beta, packing.position), None

    modeling.causal_conv1d_fn = causal_conv1d_fn
    modeling.torch_chunk_gated_delta_rule = chunk_rule
