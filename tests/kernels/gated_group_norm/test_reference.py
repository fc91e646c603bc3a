import pytest
import torch

from twinflow.kernels.gated_group_norm.reference import gated_group_norm

CASES = (((1, 8), 1), ((5, 24), 2), ((2, 3, 24), 3), ((63, 64), 8), ((0, 16), 2))


@pytest.mark.parametrize(("shape", "groups"), CASES, ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_equals_a_loop_over_groups(shape: tuple[int, ...], groups: int, eps: float) -> None:
    torch.manual_seed(0)
    n = shape[-1]
    x, gate, weight = torch.randn(shape), torch.randn(shape), torch.randn(n)
    got = gated_group_norm(x, gate, weight, groups, eps)
    assert got.shape == shape
    size = n // groups
    for row, z, y in zip(x.reshape(-1, n), gate.reshape(-1, n), got.reshape(-1, n), strict=True):
        h = (row * z / (1 + (-z).exp())).double()
        for at in range(0, n, size):
            part = h[at : at + size]
            unit = part / (part.pow(2).sum() / size + eps).sqrt()
            torch.testing.assert_close(y[at : at + size], (unit * weight[at : at + size]).float(), rtol=1e-5, atol=1e-6)


def test_a_group_does_not_see_the_others() -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(3, 24), torch.randn(3, 24), torch.randn(24)
    before = gated_group_norm(x, gate, weight, 2, 1e-6)
    x[:, :12] *= 100
    after = gated_group_norm(x, gate, weight, 2, 1e-6)
    assert after[:, 12:].equal(before[:, 12:])
    assert gated_group_norm(x, gate, weight, 1, 1e-6)[:, 12:].abs().max() < 0.2 * after[:, 12:].abs().max()


def test_bf16_is_the_rounded_fp32_result() -> None:
    torch.manual_seed(0)
    x, gate, weight = (torch.randn(s).bfloat16() for s in ((7, 64), (7, 64), (64,)))
    got = gated_group_norm(x, gate, weight, 4, 1e-6)
    assert got.dtype == torch.bfloat16
    exact = gated_group_norm(x.float(), gate.float(), weight.float(), 4, 1e-6)
    torch.testing.assert_close(got.float(), exact, rtol=1e-2, atol=1e-3)


def test_a_zero_row_stays_zero() -> None:
    assert gated_group_norm(torch.zeros(2, 8), torch.ones(2, 8), torch.ones(8), 2, 1e-6).eq(0).all()
