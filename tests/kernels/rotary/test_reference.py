import math

import pytest
import torch

from twinflow.kernels.rotary.frequencies import inverse_frequencies
from twinflow.kernels.rotary.reference import apply_rotary, rotary_angles


@pytest.mark.parametrize("rotary_dim", [8, 32], ids=("partial", "full"))
def test_every_pair_is_turned_by_its_own_angle(rotary_dim: int) -> None:
    torch.manual_seed(0)
    x, positions, theta = torch.randn(5, 3, 32), torch.tensor([0, 1, 7, 100, 4095]), 1e7
    got = apply_rotary(x, *rotary_angles(positions, inverse_frequencies(rotary_dim, theta)))
    half = rotary_dim // 2
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = position * theta ** (-2 * i / rotary_dim)
            a, b = x[t, :, i], x[t, :, i + half]
            torch.testing.assert_close(got[t, :, i], a * math.cos(angle) - b * math.sin(angle), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(
                got[t, :, i + half], b * math.cos(angle) + a * math.sin(angle), rtol=1e-3, atol=1e-3
            )
    assert got[..., rotary_dim:].equal(x[..., rotary_dim:])
    assert got[0].equal(x[0])  # position 0 turns nothing


def test_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    q, k, inv_freq = torch.randn(1, 1, 16), torch.randn(1, 1, 16), inverse_frequencies(16, 1e4)

    def score(at: int, to: int) -> float:
        turned = [apply_rotary(x, *rotary_angles(torch.tensor([p]), inv_freq)) for x, p in ((q, at), (k, to))]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_bf16_keeps_its_dtype() -> None:
    x = torch.randn(3, 2, 16).bfloat16()
    angles = rotary_angles(torch.arange(3), inverse_frequencies(8, 1e4))
    got = apply_rotary(x, *angles)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), apply_rotary(x.float(), *angles), rtol=1e-2, atol=1e-2)
