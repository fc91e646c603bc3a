import pytest
import torch

from twinflow.kernels.rotary import reference
from twinflow.kernels.rotary.frequencies import inverse_frequencies

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.rotary import triton as fast  # noqa: E402


@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("rotary", [8, 24, 64])
def test_equals_the_reference(tokens: int, rotary: int, device: str) -> None:
    positions = torch.randint(0, 262144, (tokens,), device=device)
    frequencies = inverse_frequencies(rotary, 1e7, device)
    for got, expected in zip(
        fast.rotary_angles(positions, frequencies), reference.rotary_angles(positions, frequencies), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
