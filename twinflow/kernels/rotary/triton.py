"""cos and sin of rotary embedding in one kernel. Semantics: `reference.py`."""

import torch
import triton
import triton.language as tl

from twinflow.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous

BLOCK = 1024


def rotary_angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, *, early: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """early: tuning."""
    tokens, half = positions.shape[0], inv_freq.shape[0]
    cos, sin = torch.empty(2, tokens, half, dtype=torch.float32, device=positions.device)
    if tokens:
        if early is None:
            early = dependent_launch(positions.device)
        grid = (triton.cdiv(tokens * half, BLOCK),)
        _angles[grid](
            positions, inv_freq, cos, sin, tokens, HALF=half, BLOCK=BLOCK, EARLY=early, launch_pdl=early, num_warps=4
        )
    return cos, sin


@triton.jit(do_not_specialize=["tokens"])
def _angles(positions, inv_freq, cos, sin, tokens, HALF: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < tokens * HALF
    position = tl.load(positions + at // HALF, mask=live, other=0)
    angle = position.to(tl.float32) * tl.load(inv_freq + at % HALF, mask=live, other=0.0)
    tl.store(cos + at, tl.cos(angle), mask=live)
    tl.store(sin + at, tl.sin(angle), mask=live)
