"""q/k norms, rotary embedding and the cache write of an attention layer, in plain torch."""

import torch

from twinflow.kernels.base import HeadNorm
from twinflow.kernels.norms.reference import rms_norm, rms_norm_unit_offset
from twinflow.kernels.paged_attention.reference import write_kv
from twinflow.kernels.rotary.reference import apply_rotary


def attention_inputs(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_slots: torch.Tensor | None,
) -> torch.Tensor | None:
    """Norms q and k per head, turns both by the angles, stores k and v (`write_kv`), returns q.

    q (T, H, D); k, v (T, Hkv, D); the last dim and the heads contiguous, any token stride. Norms and angles are left out
    where None; cos, sin (T, rotary_dim / 2) fp32. Caches and kv_slots as in `write_kv`. Returns (T, H, D), may be q itself.
    Either side may be left out: q None returns None; k, v and kv_slots None write nothing.
    """
    if k is not None and v is not None and kv_slots is not None:
        write_kv(_turned(k, k_norm, cos, sin), v, k_cache, v_cache, kv_slots)
    return None if q is None else _turned(q, q_norm, cos, sin)


def _turned(x: torch.Tensor, norm: HeadNorm | None, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
    if norm is not None:
        x = (rms_norm_unit_offset if norm.unit_offset else rms_norm)(x, norm.weight, norm.eps)
    return x if cos is None or sin is None else apply_rotary(x, cos, sin)
