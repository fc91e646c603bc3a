"""Keeps chats that share a row apart: convolution, recurrent state and attention all restart with `position`.

transformers' Qwen3.5 layers call two functions of their module; `install` replaces those for training. On a GPU the
recurrence runs in fla's kernel, elsewhere in transformers' own reference, one chat at a time (slow, for checks).
"""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

# fla, once installed, takes the place of this function inside transformers; unwrapped, it is plain PyTorch again.
REFERENCE_CHUNK = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
Outcome = tuple[Tensor, Tensor | None]  # output, final state
ChunkRule = Callable[..., Outcome]


@dataclass(slots=True)
class Packing:
    """Where chats begin in the rows of the present step. One object, updated by `set_rows` before each forward."""

    position: Tensor | None = None  # (rows, tokens)
    bounds: Tensor | None = None  # cumulative starts in the rows laid end to end, int64

    def set_rows(self, position: Tensor) -> None:
        self.position = position
        starts = torch.nonzero(position.flatten() == 0).flatten()
        self.bounds = F.pad(starts, (0, 1), value=position.numel())

    def attention_mask(self) -> Tensor:
        """(rows, 1, tokens, tokens), True where a query may look: same chat, not later."""
        assert self.position is not None
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


def fla_rule(pad_to: int = 0) -> ChunkRule:
    """fla's chunked kernel; `pad_to` widens V with zeros, which changes nothing but the tile shapes."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: Tensor) -> Outcome:
        width = v.shape[-1]
        v = F.pad(v, (0, max(0, pad_to - width)))
        out, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)
        return out[..., :width], None

    return rule


def reference_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: Tensor) -> Outcome:
    outs = []
    for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        part = (t[:, a:b] for t in (q, k, v))
        outs.append(REFERENCE_CHUNK(*part, g=g[:, a:b], beta=beta[:, a:b], use_qk_l2norm_in_kernel=True)[0])
    return torch.cat(outs, 1), None


def pick_rule(device: str) -> tuple[str, ChunkRule]:
    """The first of fla, fla with V padded, reference that agrees with the reference here, forward and backward."""
    if device == "cpu" or importlib.util.find_spec("fla") is None:
        return "reference", reference_rule
    torch.manual_seed(0)
    shape = {"q": 32, "k": 32, "v": 48}
    inputs = [torch.randn(1, 300, 8, d, device=device, dtype=torch.bfloat16) for d in shape.values()]
    g = F.logsigmoid(torch.randn(1, 300, 8, device=device) + 2)
    beta = torch.rand(1, 300, 8, device=device, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 70, 71, 300], device=device)
    want = _value_and_grad(reference_rule, [t.float() for t in inputs], g, beta.float(), bounds)
    for name, pad_to in (("fla", 0), ("fla, V padded to 64", 64)):
        try:
            got = _value_and_grad(fla_rule(pad_to), inputs, g, beta, bounds)
        except Exception as error:  # a kernel that does not compile for this shape: say so and try the next
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]
        print(f"{name}: relative error of output and gradients {[f'{e:.1e}' for e in errors]}", flush=True)
        if max(errors) < 2e-2:
            return name, fla_rule(pad_to)
    return "reference", reference_rule


def _value_and_grad(rule: ChunkRule, inputs: list[Tensor], g: Tensor, beta: Tensor, bounds: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (*inputs, g, beta)]
    out = rule(*leaves, bounds)[0]
    weights = torch.cos(torch.arange(out.numel(), device=out.device)).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)]


def install(packing: Packing, rule: ChunkRule, compile_convolution: bool) -> None:
    conv = torch.compile(convolve, dynamic=False) if compile_convolution else convolve

    def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: None = None, activation: str = "silu", **_: object) -> Tensor:
        return conv(x, weight, packing.position)

    def chunk_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: object) -> Outcome:
        flat = (t.reshape(1, -1, *t.shape[2:]) for t in (q, k, v, g, beta))
        out, state = rule(*flat, packing.bounds)
        return out.view(v.shape), state

    modeling.causal_conv1d_fn = causal_conv1d_fn
    modeling.torch_chunk_gated_delta_rule = chunk_rule
