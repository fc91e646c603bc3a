# ruff: noqa: B023 (each closure runs before the loop goes on)
"""A prompt that leaves states behind on its way, at the distances of a 4B hybrid and at the least ones: what they cost."""

import torch

from benchmarks.kernels.delta import delta_case
from benchmarks.kernels.shapes import HK, HV, K, bf16, lens_on_device, state_of
from benchmarks.kernels.timing import Bench
from twinflow.kernels.base import Snapshots
from twinflow.kernels.causal_conv1d.triton import causal_conv1d
from twinflow.kernels.gated_delta_rule.triton import gated_delta

CHANNELS = (2 * HK + HV) * K
TOKENS = 16384
# None, the boundary alone, with intervals of 6,336, every 1,024 and every 64 tokens.
KEPT = ((), (16320,), (6336, 12672, 16320), tuple(range(1024, 16384, 1024)), tuple(range(64, 16384, 64)))


def kept_states(bench: Bench) -> None:
    x, _ = delta_case((TOKENS,))
    mixed, weight = bf16(TOKENS, CHANNELS), bf16(CHANNELS, 4)
    for kept in KEPT:
        after = torch.tensor(kept or (0,), dtype=torch.int32, device="cuda")
        rows = torch.arange(2, 2 + len(after), device="cuda")
        snapshots = Snapshots(lens_on_device((len(kept),)), after, rows) if kept else None
        own, fresh, cu = rows[:1] - 1, torch.zeros(1, dtype=torch.bool, device="cuda"), lens_on_device((TOKENS,))
        pool = (1,) * (len(kept) + 2)
        state, conv = state_of(pool, HV, K, K)[0], state_of(pool, CHANNELS, 3)[0].bfloat16()
        shape = f"T={TOKENS}, {len(kept)} kept"
        where = (own, fresh, cu, (TOKENS,))
        moved = 2 * TOKENS * (2 * HK + 2 * HV) * K + 4 * (2 + len(kept)) * HV * K * K
        operations = 2 * TOKENS * HV * (5 * 64 * K + 3 * K * K)
        delta = lambda: gated_delta(*x, state, *where, snapshots=snapshots)  # noqa: E731
        bench.add("gated delta, chunks", shape, delta, moved, operations)
        convolve = lambda: causal_conv1d(mixed, weight, None, conv, *where, snapshots=snapshots)  # noqa: E731
        bench.add("causal conv1d", shape, convolve, 2 * mixed.nbytes)
