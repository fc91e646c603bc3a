import torch

from twinflow.kernels.linear.reference import linear, linear_swiglu


def test_linear_and_its_wider_result() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 8), torch.randn(3, 8)
    torch.testing.assert_close(linear(x, weight), x @ weight.T, rtol=1e-6, atol=1e-6)
    half = linear(x.bfloat16(), weight.bfloat16())
    wide = linear(x.bfloat16(), weight.bfloat16(), torch.float32)
    assert (half.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert wide.bfloat16().equal(half)


def test_swiglu_takes_the_gate_from_the_first_rows() -> None:
    torch.manual_seed(0)
    x, gate, up = torch.randn(5, 8), torch.randn(3, 8), torch.randn(3, 8)
    g = x @ gate.T
    torch.testing.assert_close(
        linear_swiglu(x, torch.cat([gate, up])), g / (1 + (-g).exp()) * (x @ up.T), rtol=1e-5, atol=1e-6
    )
