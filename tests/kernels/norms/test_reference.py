import pytest
import torch

from twinflow.kernels.norms.reference import gated_rms_norm, rms_norm, rms_norm_unit_offset

CASES = ((1, 8), (5, 3, 24), (63, 64), (0, 16))


def rms(row: torch.Tensor, eps: float) -> float:
    return float((sum(float(v) ** 2 for v in row) / len(row) + eps) ** 0.5)


@pytest.mark.parametrize("shape", CASES, ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_norms_equal_a_loop_over_rows(shape: tuple[int, ...], eps: float) -> None:
    torch.manual_seed(0)
    x, gate, w = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    plain, offset, gated = rms_norm(x, w, eps), rms_norm_unit_offset(x, w, eps), gated_rms_norm(x, gate, w, eps)
    assert plain.shape == offset.shape == gated.shape == shape
    flat = [t.reshape(-1, shape[-1]) for t in (x, gate, plain, offset, gated)]
    for row, g, p, o, y in zip(*flat, strict=True):
        unit = row / rms(row, eps)
        torch.testing.assert_close(p, unit * w, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(o, unit * (1 + w), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(y, unit * w * g / (1 + (-g).exp()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [rms_norm, rms_norm_unit_offset], ids=lambda f: f.__name__)
def test_bf16_is_the_rounded_fp32_result(norm) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(7, 64).bfloat16(), torch.randn(64).bfloat16()
    got = norm(x, w, 1e-6)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), norm(x.float(), w.float(), 1e-6), rtol=1e-2, atol=1e-3)


def test_a_zero_row_stays_zero() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).eq(0).all()
