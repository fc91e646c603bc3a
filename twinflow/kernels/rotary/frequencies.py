"""The constants of rotary embedding, computed once when a model is built; shared by every version of the kernel."""

import torch


def inverse_frequencies(rotary_dim: int, theta: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """`theta ** (-2i / rotary_dim)` for i in 0..rotary_dim/2-1; (rotary_dim / 2,) fp32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return 1.0 / (theta**exponents)
