"""The gated delta rule for training, over rows of packed chats: fla's Triton kernels where they are right, else PyTorch.

fla 0.6.0 refuses the backward pass on Hopper with Triton 3.4 to 3.7.0, where its kernel with chunks of 64 gives wrong
gradients. Chunks of 32 take another instruction, and the kernels of the more general KDA rule are others altogether. So
`pick` measures output and every gradient of each candidate against transformers' own function, on the machine that
trains, and takes the first that agrees.
"""

import importlib.util
import inspect
import itertools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

# fla, once installed, takes the place of this function inside transformers; unwrapped, it is plain PyTorch again.
REFERENCE = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
# (q, k, v, g, beta, position) -> output. q, k (rows, tokens, heads, K), v (…, V), g log decay and beta (…, heads),
# position (rows, tokens) restarts at 0 with each chat.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

RESET = -60.0  # log decay at a chat's first token: exp(-60) of the old state is nothing, and fp32 keeps its digits
TOLERANCE = 2e-2  # relative, bf16 operands


def dense(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, position: Tensor, chunk: int = 64) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return _dense(q, k, v, g, beta, position, chunk)


def _dense(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, position: Tensor, chunk: int) -> Tensor:
    """Chunked form (Yang et al., "Gated Delta Networks", section 3.3) in fp32. Rows are padded to whole chunks."""
    tokens = q.shape[1]
    fill = -tokens % chunk
    g = torch.where(position[..., None] == 0, g.float() + RESET, g.float())
    q, k = (t.float() * torch.rsqrt(t.float().square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    # (rows, heads, chunks, chunk, width)
    q, k, v, g, beta = (
        F.pad(t.float(), (0, 0) * (t.ndim - 2) + (0, fill)).unflatten(1, (-1, chunk)).movedim(3, 1)
        for t in (q * q.shape[-1] ** -0.5, k, v, g, beta)
    )
    g = g.cumsum(-1)
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = torch.exp(torch.where(earlier, g[..., :, None] - g[..., None, :], 0.0)) * earlier
    system = (beta[..., None] * (k @ k.mT) * decay).tril(-1) + torch.eye(chunk, device=q.device)
    sides = torch.cat([v, k * g.exp()[..., None]], -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    writes, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.mT) * decay
    q = q * g.exp()[..., None]
    last = g[..., -1]
    k = k * (last[..., None] - g).exp()[..., None]
    keep = last.exp()[..., None, None]
    state, outs = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0]), []
    for i in range(q.shape[2]):
        delta = writes[:, :, i] - reads[:, :, i] @ state
        outs.append(q[:, :, i] @ state + scores[:, :, i] @ delta)
        state = keep[:, :, i] * state + k[:, :, i].mT @ delta
    return torch.stack(outs, 2).movedim(1, 3).flatten(1, 2)[:, :tokens]


def fla_gdn() -> Rule:
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.IS_NVIDIA_HOPPER = False  # lifts the refusal; `pick` has the last word

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, position: Tensor) -> Tensor:
        flat = [t.reshape(1, -1, *t.shape[2:]) for t in (q, k, v, g, beta)]
        return chunk_gated_delta_rule(*flat, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds(position), chunk_size=32)[
            0
        ].view_as(v)

    return rule


def fla_kda() -> Rule:
    from fla.ops.kda import chunk_kda

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, position: Tensor) -> Tensor:
        g = g[..., None].expand(k.shape)  # KDA has one decay per key dimension
        flat = [t.reshape(1, -1, *t.shape[2:]) for t in (q, k, v, g, beta)]
        return chunk_kda(*flat, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds(position))[0].view_as(v)

    return rule


def bounds(position: Tensor) -> Tensor:
    """Cumulative starts of the chats in the rows laid end to end, int64."""
    return F.pad(torch.nonzero(position.flatten() == 0).flatten(), (0, 1), value=position.numel())


def pick(device: str) -> tuple[str, Rule]:
    candidates = {"fla gated_delta_rule": fla_gdn, "fla kda": fla_kda, "dense": lambda: dense}
    if device == "cpu" or importlib.util.find_spec("fla") is None:
        return "dense", dense
    for name, make in candidates.items():
        started = time.monotonic()
        try:
            errors = errors_of(make(), device)
        except Exception as error:  # a kernel that this machine cannot compile: say so and try the next
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        print(f"{name}: {errors} after {time.monotonic() - started:.0f} s", flush=True)
        if max(errors.values()) < TOLERANCE:
            return name, make()
    raise RuntimeError("no rule agrees with the reference here")


def errors_of(rule: Rule, device: str) -> dict[str, float]:
    """Relative error of output and gradients on 2 rows of 3 and 2 chats, against the reference run chat by chat in fp32."""
    torch.manual_seed(0)
    lengths = ((100, 1, 211), (64, 248))
    position = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(device)
    operand = torch.float32 if device == "cpu" else torch.bfloat16
    shape = (*position.shape, 8)
    q, k, v = (torch.randn(*shape, width, device=device, dtype=operand) for width in (32, 32, 48))
    g = F.logsigmoid(torch.randn(shape, device=device) + 2)
    beta = torch.rand(shape, device=device, dtype=operand)
    weights = torch.randn(v.shape, device=device)

    def by_chat(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, position: Tensor) -> Tensor:
        edges = bounds(position).tolist()
        q, k, v, g, beta = (t.flatten(0, 1)[None] for t in (q, k, v, g, beta))
        outs = []
        for part in itertools.starmap(slice, itertools.pairwise(edges)):
            operands = (t[:, part] for t in (q, k, v))
            outs.append(REFERENCE(*operands, g=g[:, part], beta=beta[:, part], use_qk_l2norm_in_kernel=True)[0])
        return torch.cat(outs, 1).view_as(weights)

    results = []
    for run, cast in ((rule, lambda t: t), (by_chat, torch.Tensor.float)):
        leaves = [cast(t).clone().requires_grad_() for t in (q, k, v, g, beta)]
        out = run(*leaves, position)
        results.append([out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)])
    names = ("output", "dq", "dk", "dv", "dg", "dbeta")
    return {
        n: float(f"{((a.float() - b.float()).norm() / b.float().norm()).item():.1e}")
        for n, a, b in zip(names, *results, strict=True)
    }
