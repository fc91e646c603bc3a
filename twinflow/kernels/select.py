"""The one place that chooses between versions of the kernels."""

import importlib.util
import logging
from functools import partial
from typing import TYPE_CHECKING

import torch

from twinflow.contracts.errors import Unsupported
from twinflow.kernels.attention_inputs import reference as inputs
from twinflow.kernels.base import KernelSet
from twinflow.kernels.causal_conv1d import reference as conv
from twinflow.kernels.gated_delta_rule import reference as delta
from twinflow.kernels.gated_group_norm import reference as group_norm
from twinflow.kernels.gating import reference as gating
from twinflow.kernels.linear import reference as linear
from twinflow.kernels.mamba2_ssd import reference as ssd
from twinflow.kernels.norms import reference as norms
from twinflow.kernels.paged_attention import reference as attention
from twinflow.kernels.rotary import reference as rotary
from twinflow.kernels.sampling import reference as sampling

if TYPE_CHECKING:
    from twinflow.kernels.paged_attention.library import Library

log = logging.getLogger(__name__)


def select_kernels(device: str, attention: str = "auto", head_dim: int = 64) -> KernelSet:
    """Kernels for `device` ("cpu", "cuda:0"): Triton on an NVIDIA GPU where it is installed, else plain torch. Says which.

    attention: "cudnn" or "flashinfer" = that library attends to long stretches of prompts, "triton" = none does, "auto" = cuDNN
    where it can. head_dim: of the attention layers; a library is tried with it. Raises Unsupported where a library is asked for
    and cannot be had; on a CPU there is nothing to choose.
    """
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu and importlib.util.find_spec("triton") is not None:
        from twinflow.kernels.paged_attention.library import Library, why_not

        library = Library.CUDNN if attention == "auto" else None if attention == "triton" else Library(attention)
        reasons = dict.fromkeys(Library, "not asked for")
        if library is not None:
            reasons[library] = why_not(library, torch.device(device), head_dim)
        if attention == "auto":
            missing = importlib.util.find_spec("flashinfer") is None
            reasons[Library.FLASHINFER] = "not installed" if missing else "only where it is asked for"
        if library is not None and reasons[library]:
            if attention != "auto":
                raise Unsupported(
                    f"attention={attention} cannot be used on {device}: {reasons[library]}; use auto or triton"
                )
            library = None
        kernels = triton_kernels(library)
        others = ", ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        why = f"{torch.cuda.get_device_name(device)}; attention of long stretches of prompts: {library or 'triton'} ({others})"
    else:
        kernels, why = reference_kernels(), "triton is not installed" if on_gpu else "no GPU kernels for this device"
    log.info("kernels for %s: %s (%s)", device, kernels.name, why)
    return kernels


def reference_kernels() -> KernelSet:
    """Plain torch everywhere: the oracle, and what CPU runs on."""
    return KernelSet(
        name="reference",
        rms_norm=norms.rms_norm,
        rms_norm_unit_offset=norms.rms_norm_unit_offset,
        add_rms_norm=norms.add_rms_norm,
        gated_rms_norm=norms.gated_rms_norm,
        gated_group_norm=group_norm.gated_group_norm,
        sigmoid_gate=gating.sigmoid_gate,
        linear=linear.linear,
        linear_residual=linear.linear_residual,
        linear_swiglu=linear.linear_swiglu,
        rotary_angles=rotary.rotary_angles,
        attention_inputs=inputs.attention_inputs,
        paged_attention=attention.paged_attention,
        causal_conv1d=conv.causal_conv1d,
        gated_delta=delta.gated_delta,
        gated_delta_decode=delta.gated_delta_decode,
        mamba2_ssd=ssd.mamba2_ssd,
        sample_tokens=sampling.sample_tokens,
        token_logprobs=sampling.token_logprobs,
    )


def triton_kernels(library: "Library | None" = None) -> KernelSet:
    """Triton everywhere, but for the attention of very long chunks with a `library`. Raises ImportError where triton is
    missing."""
    from twinflow.kernels.attention_inputs import triton as inputs
    from twinflow.kernels.causal_conv1d import triton as conv
    from twinflow.kernels.gated_delta_rule import decode as delta_decode
    from twinflow.kernels.gated_delta_rule import triton as delta
    from twinflow.kernels.gated_group_norm import triton as group_norm
    from twinflow.kernels.gating import triton as gating
    from twinflow.kernels.linear import triton as linear
    from twinflow.kernels.mamba2_ssd import triton as ssd
    from twinflow.kernels.norms import triton as norms
    from twinflow.kernels.paged_attention import triton as attention
    from twinflow.kernels.rotary import triton as rotary
    from twinflow.kernels.sampling import triton as sampling

    return KernelSet(
        name="triton",
        rms_norm=norms.rms_norm,
        rms_norm_unit_offset=norms.rms_norm_unit_offset,
        add_rms_norm=norms.add_rms_norm,
        gated_rms_norm=norms.gated_rms_norm,
        gated_group_norm=group_norm.gated_group_norm,
        sigmoid_gate=gating.sigmoid_gate,
        linear=linear.linear,
        linear_residual=linear.linear_residual,
        linear_swiglu=linear.linear_swiglu,
        rotary_angles=rotary.rotary_angles,
        attention_inputs=inputs.attention_inputs,
        paged_attention=partial(attention.paged_attention, library=library),
        causal_conv1d=conv.causal_conv1d,
        gated_delta=delta.gated_delta,
        gated_delta_decode=delta_decode.gated_delta_decode,
        mamba2_ssd=ssd.mamba2_ssd,
        sample_tokens=sampling.sample_tokens,
        token_logprobs=sampling.token_logprobs,
    )
