"""The one place that chooses between versions of the kernels."""

from twinflow.kernels.base import KernelSet
from twinflow.kernels.causal_conv1d import reference as conv
from twinflow.kernels.gated_delta_rule import reference as delta
from twinflow.kernels.gated_group_norm import reference as group_norm
from twinflow.kernels.gating import reference as gating
from twinflow.kernels.mamba2_ssd import reference as ssd
from twinflow.kernels.norms import reference as norms
from twinflow.kernels.paged_attention import reference as attention
from twinflow.kernels.rotary import reference as rotary


def reference_kernels() -> KernelSet:
    """Plain torch everywhere: the oracle, and what CPU runs on."""
    return KernelSet(
        rms_norm=norms.rms_norm,
        rms_norm_unit_offset=norms.rms_norm_unit_offset,
        gated_rms_norm=norms.gated_rms_norm,
        gated_group_norm=group_norm.gated_group_norm,
        sigmoid_gate=gating.sigmoid_gate,
        swiglu=gating.swiglu,
        rotary_angles=rotary.rotary_angles,
        apply_rotary=rotary.apply_rotary,
        write_kv=attention.write_kv,
        paged_attention=attention.paged_attention,
        causal_conv1d=conv.causal_conv1d,
        delta_gates=delta.delta_gates,
        gated_delta_rule=delta.gated_delta_rule,
        mamba2_ssd=ssd.mamba2_ssd,
    )


def select_kernels(device: str) -> KernelSet:
    """Kernels for `device` ("cpu", "cuda:0"). Every device gets the reference versions today."""
    del device
    return reference_kernels()
