import pytest
import torch

from tests.kernels.varlen import fused, relative_error
from twinflow.kernels.norms import reference

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.norms import triton as fast  # noqa: E402

SHAPES = ((1, 8), (5, 3, 24), (2, 2, 3, 16), (7, 64), (3, 2560), (0, 16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norms_equal_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x, y, w = (torch.randn(s).to(dtype).to(device) for s in (shape, shape, shape[-1:]))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    pairs = [
        (fast.rms_norm(x, w, 1e-3), reference.rms_norm(x, w, 1e-3)),
        (fast.rms_norm_unit_offset(x, w, 1e-3), reference.rms_norm_unit_offset(x, w, 1e-3)),
        (fast.gated_rms_norm(x, y, w, 1e-3), reference.gated_rms_norm(x, y, w, 1e-3)),
    ]
    for unit_offset in (False, True):
        total, normed = fast.add_rms_norm(x, y, w, 1e-3, unit_offset)
        expected_total, expected = reference.add_rms_norm(x, y, w, 1e-3, unit_offset)
        assert total.equal(expected_total)
        pairs.append((normed, expected))
    for got, expected in pairs:
        assert got.is_contiguous()
        if 0 in shape:
            assert got.shape == expected.shape
        else:
            assert relative_error(got, expected) < tolerance


def test_heads_inside_a_projection(device: str) -> None:
    torch.manual_seed(0)
    x, gate = (t.to(device) for t in (torch.randn(5, 3, 32), torch.randn(5, 3, 32)))
    w = torch.randn(32, device=device)
    x_view, gate_view = fused(x, gate)
    assert relative_error(fast.rms_norm(x_view, w, 1e-6), reference.rms_norm(x, w, 1e-6)) < 1e-6
    got = fast.gated_rms_norm(x_view, gate_view, w, 1e-6)
    assert relative_error(got, reference.gated_rms_norm(x, gate, w, 1e-6)) < 1e-6


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parts_of_what_is_added(parts: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(3, 96).to(dtype).to(device), torch.randn(96).to(dtype).to(device)
    y = torch.randn(parts, 3, 96, device=device)
    for unit_offset in (False, True):
        got = fast.add_rms_norm(x, y, w, 1e-3, unit_offset)
        for mine, expected in zip(got, reference.add_rms_norm(x, y, w, 1e-3, unit_offset), strict=True):
            assert relative_error(mine, expected) < (1e-6 if dtype == torch.float32 else 2e-3)
