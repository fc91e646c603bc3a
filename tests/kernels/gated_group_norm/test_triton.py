import pytest
import torch

from tests.kernels.varlen import fused, relative_error
from twinflow.kernels.gated_group_norm import reference

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.gated_group_norm import triton as fast  # noqa: E402


@pytest.mark.parametrize(("n", "groups"), [(8, 1), (24, 2), (144, 3), (4096, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_the_reference(n: int, groups: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x, gate, w = (torch.randn(s).to(dtype).to(device) for s in ((5, n), (5, n), (n,)))
    expected = reference.gated_group_norm(x, gate, w, groups, 1e-3)
    got = fast.gated_group_norm(x, fused(gate)[0], w, groups, 1e-3)
    assert relative_error(got, expected) < (1e-6 if dtype == torch.float32 else 2e-3)


def test_no_rows(device: str) -> None:
    x = torch.empty(0, 16, device=device)
    assert fast.gated_group_norm(x, x, torch.ones(16, device=device), 2, 1e-6).shape == (0, 16)
