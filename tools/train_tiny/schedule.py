"""Optimisers and learning rate. The rate follows the clock, not the step count: a run ends when its minutes are up."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from transformers import Qwen3_5ForCausalLM

WARMUP, COOLDOWN_FROM = 0.02, 0.25  # fractions of the run


def rate(progress: float) -> float:
    """Factor on the peak rate: up in a line, flat, then down in a line to zero."""
    if progress < WARMUP:
        return progress / WARMUP + 1e-3
    return max(0.0, min(1.0, (1 - progress) / (1 - COOLDOWN_FROM)))


def spread_decays(model: Qwen3_5ForCausalLM) -> None:
    """A fresh model's recurrent heads forget over useful time scales, about 1 to 1,000 tokens."""
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            step = torch.exp(torch.rand_like(module.dt_bias) * math.log(100) + math.log(1e-3))  # 0.001 to 0.1
            module.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
            module.A_log.data.copy_(torch.empty_like(module.A_log).uniform_(1, 16).log())


def add_dropout(model: Qwen3_5ForCausalLM, share: float) -> None:
    """On all that joins the residual stream, while training."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in ("out_proj", "o_proj", "down_proj", "embed_tokens"):
            module.register_forward_hook(lambda m, _, out: nn.functional.dropout(out, share, m.training))


def optimizers(model: nn.Module, peak: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers; AdamW for the embedding, convolutions and vectors."""
    matrices, tables, rest = [], [], []  # type: list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]
    for name, p in model.named_parameters():
        (tables if "embed" in name else matrices if p.ndim == 2 else rest).append(p)
    fused = matrices[0].is_cuda
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(tables, lr=peak, betas=(0.9, 0.98), weight_decay=weight_decay / 10, fused=fused),
        torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.98), weight_decay=0.0, fused=fused),
    ]


def set_rate(optimizers: Iterable[torch.optim.Optimizer], peak: float, progress: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = peak * rate(progress)
