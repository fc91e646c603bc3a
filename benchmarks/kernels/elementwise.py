# ruff: noqa: B023 (each closure runs before the loop goes on)
"""Norms, gates and what attention does before it attends."""

import torch

from benchmarks.kernels.shapes import BLOCK, DIM, FFN, HEADS, HIDDEN, HV, KV_HEADS, MG, MH, MP, ROTARY, K, bf16, caches
from benchmarks.kernels.timing import Bench
from twinflow.kernels.attention_inputs.triton import attention_inputs
from twinflow.kernels.base import HeadNorm
from twinflow.kernels.gated_group_norm.triton import gated_group_norm
from twinflow.kernels.gating.triton import sigmoid_gate, swiglu
from twinflow.kernels.norms.triton import add_rms_norm, gated_rms_norm


def elementwise(bench: Bench) -> None:
    for tokens in (256, 16384):
        x, y, w, shape = bf16(tokens, HIDDEN), bf16(tokens, HIDDEN), bf16(HIDDEN), f"T={tokens}"
        bench.add("add + rms norm", shape, lambda: add_rms_norm(x, y, w, 1e-6, True), 4 * x.nbytes)
        o, z, wv = bf16(tokens, HV, K), bf16(tokens, HV, K), bf16(K)
        bench.add("gated rms norm", shape, lambda: gated_rms_norm(o, z, wv, 1e-6), 3 * o.nbytes)
        up = bf16(tokens, 2 * FFN)
        bench.add("swiglu", shape, lambda: swiglu(up), 1.5 * up.nbytes)
        m, mz, mw = bf16(tokens, MH * MP), bf16(tokens, MH * MP), bf16(MH * MP)
        bench.add("gated group norm", shape, lambda: gated_group_norm(m, mz, mw, MG, 1e-5), 3 * m.nbytes)
        qkv = bf16(tokens, (2 * HEADS + 2 * KV_HEADS) * DIM)
        q, gate, k, v = qkv.split([HEADS * DIM, HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1)
        bench.add("sigmoid gate", shape, lambda: sigmoid_gate(o.flatten(1), gate), 3 * o.nbytes)
        q, k, v = q.unflatten(1, (HEADS, DIM)), k.unflatten(1, (KV_HEADS, DIM)), v.unflatten(1, (KV_HEADS, DIM))
        norm = HeadNorm(bf16(DIM), 1e-6, True)
        angles = torch.randn(2, tokens, ROTARY // 2, device="cuda").unbind(0)
        store, slots = caches(tokens // BLOCK), torch.randperm(tokens, device="cuda")
        moved = 2 * 2 * tokens * (HEADS + 2 * KV_HEADS) * DIM
        bench.add(
            "norm + rotary + KV write",
            shape,
            lambda: attention_inputs(q, k, v, norm, norm, *angles, *store, slots),
            moved,
        )
