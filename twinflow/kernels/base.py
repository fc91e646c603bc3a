"""The operations a model is built from. Models hold a `KernelSet`; `select.py` decides which versions are in it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One implementation of each operation; signatures and semantics are those of `<op>/reference.py`.

    State kernels update their pools in place by row index; index -1 means padding everywhere.
    """

    rms_norm: Callable[..., torch.Tensor]
    rms_norm_unit_offset: Callable[..., torch.Tensor]
    gated_rms_norm: Callable[..., torch.Tensor]
    gated_group_norm: Callable[..., torch.Tensor]
    sigmoid_gate: Callable[..., torch.Tensor]
    swiglu: Callable[..., torch.Tensor]
    rotary_angles: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    apply_rotary: Callable[..., torch.Tensor]
    write_kv: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]
    causal_conv1d: Callable[..., torch.Tensor]
    delta_gates: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_delta_rule: Callable[..., torch.Tensor]
    mamba2_ssd: Callable[..., torch.Tensor]
