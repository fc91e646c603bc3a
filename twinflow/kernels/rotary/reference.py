"""Rotary position embedding (Su et al. 2021) on the first dims of a head, in NeoX halves, in plain torch."""

import torch


def rotary_angles(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of `position * inv_freq`, each (T, rotary_dim / 2) fp32. positions (T,) int64."""
    angles = positions.float()[:, None] * inv_freq
    return angles.cos(), angles.sin()


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates dim i against dim i + rotary_dim/2; dims from rotary_dim on pass through.

    x (T, heads, head_dim); cos, sin (T, rotary_dim / 2) fp32. Computed in fp32. Returns x's shape and dtype.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat([rotated, x[..., 2 * half :]], dim=-1)
