import pytest
import torch

from tests.kernels.varlen import fused, relative_error
from twinflow.kernels.gating import reference

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.gating import triton as fast  # noqa: E402


@pytest.mark.parametrize(("rows", "n"), [(1, 8), (5, 96), (3, 1025), (0, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gates_equal_the_reference(rows: int, n: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x, gate = (torch.randn(rows, n).to(dtype).to(device) * 4 for _ in range(2))
    both = torch.cat([gate, x], 1)
    got = [fast.sigmoid_gate(x, fused(gate)[0]), fast.swiglu(both)]
    for mine, expected in zip(got, (reference.sigmoid_gate(x, gate), reference.swiglu(both)), strict=True):
        assert mine.shape == (rows, n)
        if rows:
            assert relative_error(mine, expected) < (1e-6 if dtype == torch.float32 else 2e-3)
