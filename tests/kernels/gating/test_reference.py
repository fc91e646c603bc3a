import torch

from twinflow.kernels.gating.reference import sigmoid_gate, swiglu


def test_sigmoid_gate() -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(5, 8), torch.randn(5, 8)
    torch.testing.assert_close(sigmoid_gate(x, gate), x / (1 + (-gate).exp()), rtol=1e-6, atol=1e-6)


def test_swiglu_takes_the_gate_from_the_first_half() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(5, 8), torch.randn(5, 8)
    torch.testing.assert_close(swiglu(torch.cat([gate, up], 1)), gate / (1 + (-gate).exp()) * up, rtol=1e-6, atol=1e-6)
