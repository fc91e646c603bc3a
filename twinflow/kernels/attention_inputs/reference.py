"""q/k norms, rotary embedding and the cache write of an attention layer, in plain torch."""

import torch

from twinflow.kernels.base import HeadNorm
from twinflow.kernels.norms.reference import rms_norm, rms_norm_unit_offset
from twinflow.kernels.paged_attention.reference import write_kv
from twinflow.kernels.rotary.reference import apply_rotary


def attention_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_slots: torch.Tensor,
) -> torch.Tensor:
    """Norms q and k per head, turns both by the angles, stores k and v (`write_kv`), returns q.

    q (T, H, D); k, v (T, Hkv, D); the last dim and the heads contiguous, any token stride. Norms and angles are left out
    where None; cos, sin (T, rotary_dim / 2) fp32. Caches and kv_slots as in `write_kv`. Returns (T, H, D), may be q itself.
    """
    q, k = _norm(q, q_norm), _norm(k, k_norm)
    if cos is not None and sin is not None:
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
    write_kv(k, v, k_cache, v_cache, kv_slots)
    return q


def _norm(x: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
    if norm is None:
        return x
    return (rms_norm_unit_offset if norm.unit_offset else rms_norm)(x, norm.weight, norm.eps)
