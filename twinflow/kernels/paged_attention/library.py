"""Long stretches of a prompt through a library's attention, on K and V gathered from the cache. Semantics: `reference.py`.

Their matrix units wait less than those of `prefill.py`. But cuDNN makes a plan for every new pair of lengths, which takes some 45
ms, so lengths are rounded up, and a stretch behind a context is attended in two parts:

    keys    0 ........ kept ...... context - n ...... context
            |  before  |  square: the last keys, and from here on the stretch itself

*before* is a whole number of `BEFORE` keys, seen by all queries. *square* has as many queries as keys, causal, the first of
which are no queries of the stretch: what they give is dropped. Zeros behind the end are seen by no query.
"""

import importlib.util
import math
from enum import StrEnum
from functools import lru_cache

import torch
import triton
import triton.language as tl

from twinflow.kernels.triton_tools import power_of_2, sigmoid

LONG = 2048  # queries of one sequence, from which on this pays
MOST_KEYS = 65536  # of a context; what gathering takes is bounded so
SQUARE, BEFORE = 512, 2048  # what lengths are rounded to
TOKENS = 16  # that a program gathers


class Library(StrEnum):
    CUDNN = "cudnn"
    FLASHINFER = "flashinfer"


@lru_cache
def why_not(library: Library, device: torch.device, dim: int = 64) -> str:
    """Why a library cannot be used on a device for heads of `dim`; empty where it can. flashinfer compiles its kernels for that
    width here, once on a machine: that takes it a minute or two, and nvcc."""
    if device.type != "cuda":
        return "no GPU"
    if library is Library.CUDNN:
        if not torch.backends.cudnn.is_available():
            return "torch has no cuDNN here"
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "only tried from Hopper on"
    elif importlib.util.find_spec("flashinfer") is None:
        return "not installed"
    q = torch.zeros(128, 4, dim, dtype=torch.bfloat16, device=device)
    try:
        _attend(
            library, _batched(q), _batched(q[:, :2].contiguous()), _batched(q[:, 2:].contiguous()), 1.0, causal=True
        )
    except Exception as error:  # of a compiler, a loader or the driver: any of them means that it cannot be used
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def attend_long_queries(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    context: int,
    scale: float,
    out: torch.Tensor,
    gate: torch.Tensor | None = None,
    library: Library = Library.CUDNN,
) -> None:
    """The last `q.shape[0]` tokens of one sequence with `context` tokens. q, gate, out (n, H, D), the gate's heads side by
    side too; table (blocks,) int32, caches as in `paged_attention`. Half precision."""
    tokens, heads, dim = q.shape
    past = context - tokens
    before = past // BEFORE * BEFORE
    front = past - before
    square = round_up(front + tokens, SQUARE)
    asked = round_up(tokens, SQUARE) if before else 0  # queries of the part before
    rows = max(square, front + asked)
    keys, values = _gather(k_cache, v_cache, table, context, before + square)
    if rows > tokens:
        padded = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
        padded[front : front + tokens] = q
    else:
        padded = q
    queries = _batched(padded)
    y, mass = _attend(library, queries[:, :, :square], keys[:, :, before:], values[:, :, before:], scale, causal=True)
    parts = [(y, mass, front)]
    if before:
        y, mass = _attend(
            library,
            queries[:, :, front : front + asked],
            keys[:, :, :before],
            values[:, :, :before],
            scale,
            causal=False,
        )
        parts.append((y, mass, 0))
    _merge(parts, out, gate)


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _batched(x: torch.Tensor) -> torch.Tensor:
    """(n, H, D) as (1, H, n, D)."""
    return x.transpose(0, 1).unsqueeze(0)


def _attend(
    library: Library, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values' average (1, H, n, D), and the logarithm of the sum of its weights (1, H, n, 1) fp32."""
    if library is Library.FLASHINFER:
        import flashinfer

        rows = [x.squeeze(0).transpose(0, 1) for x in (q, k, v)]
        y, mass = flashinfer.single_prefill_with_kv_cache(*rows, causal=causal, sm_scale=scale, return_lse=True)
        return _batched(y), (mass.t() * math.log(2.0)).contiguous().view(
            1, q.shape[1], -1, 1
        )  # it counts in powers of two
    y, mass, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return y, mass


def _gather(
    k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, context: int, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V (1, Hkv, room, D) of a sequence's `context` tokens, zeros behind them."""
    _, heads, block_tokens, dim = k_cache.shape
    keys = torch.empty(room, heads, dim, dtype=k_cache.dtype, device=k_cache.device)
    values = torch.empty_like(keys)
    _collect[(triton.cdiv(room, TOKENS), heads)](
        k_cache,
        v_cache,
        table,
        keys,
        values,
        context,
        room,
        PAGE_STRIDE=k_cache.stride(0),
        HEAD_STRIDE=k_cache.stride(1),
        TOKEN_STRIDE=k_cache.stride(2),
        BLOCK_TOKENS=block_tokens,
        HEADS=heads,
        DIM=dim,
        WIDTH=power_of_2(dim),
        TOKENS=TOKENS,
    )
    return _batched(keys), _batched(values)


def _merge(parts: list[tuple[torch.Tensor, torch.Tensor, int]], out: torch.Tensor, gate: torch.Tensor | None) -> None:
    """Weighs one or two parts, each with the row its first token has in it, and applies the gate."""
    tokens, heads, dim = out.shape
    (y, mass, front), (other, other_mass, _) = parts[0], parts[-1]
    gates, gate_stride = (out, 0) if gate is None else (gate, gate.stride(0))
    _join[(tokens,)](
        y,
        mass,
        other,
        other_mass,
        gates,
        out,
        front,
        y.stride(2),
        y.stride(1),
        other.stride(2),
        other.stride(1),
        mass.shape[2],
        other_mass.shape[2],
        gate_stride,
        PARTS=len(parts),
        GATED=gate is not None,
        HEADS=heads,
        HEADS_WIDTH=power_of_2(heads),
        DIM=dim,
        WIDTH=power_of_2(dim),
    )


@triton.jit(do_not_specialize=["context", "room"], do_not_specialize_on_alignment=["table"])
def _collect(
    k_cache,
    v_cache,
    table,
    keys,
    values,
    context,
    room,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    col = tl.arange(0, WIDTH)
    page = tl.load(table + token // BLOCK_TOKENS, mask=token < context, other=-1).to(tl.int64)
    at = page * PAGE_STRIDE + head * HEAD_STRIDE + (token % BLOCK_TOKENS) * TOKEN_STRIDE
    there = (page >= 0)[:, None] & (col < DIM)[None, :]
    to = (token.to(tl.int64) * HEADS + head)[:, None] * DIM + col[None, :]
    inside = (token < room)[:, None] & (col < DIM)[None, :]
    tl.store(keys + to, tl.load(k_cache + at[:, None] + col[None, :], mask=there, other=0.0), mask=inside)
    tl.store(values + to, tl.load(v_cache + at[:, None] + col[None, :], mask=there, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["front"])
def _join(
    y,
    mass,
    other,
    other_mass,
    gate,
    out,
    front,
    y_token,
    y_head,
    other_token,
    other_head,
    rows,
    other_rows,
    gate_stride,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One token: its heads' averages weighed by their masses."""
    token = tl.program_id(0).to(tl.int64)
    head, col = tl.arange(0, HEADS_WIDTH), tl.arange(0, WIDTH)
    inside = (head < HEADS)[:, None] & (col < DIM)[None, :]
    at = (token + front) * y_token + head[:, None] * y_head + col[None, :]
    result = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 1:
        own = tl.load(mass + head * rows + token + front, mask=head < HEADS, other=0.0)
        theirs = tl.load(other_mass + head * other_rows + token, mask=head < HEADS, other=0.0)
        share = 1.0 / (1.0 + tl.exp(own - theirs))
        at = token * other_token + head[:, None] * other_head + col[None, :]
        more = tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        result += (more - result) * share[:, None]
    at = head[:, None] * DIM + col[None, :]
    if GATED:
        result *= sigmoid(tl.load(gate + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + token * (HEADS * DIM) + at, result.to(out.dtype.element_ty), mask=inside)
