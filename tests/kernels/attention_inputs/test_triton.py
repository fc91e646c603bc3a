import pytest
import torch

from tests.kernels.varlen import fused, relative_error
from twinflow.kernels.attention_inputs import reference
from twinflow.kernels.base import HeadNorm
from twinflow.kernels.rotary.frequencies import inverse_frequencies
from twinflow.kernels.rotary.reference import rotary_angles

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.attention_inputs import triton as fast  # noqa: E402

BLOCK = 16


def caches(kv_heads: int, dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised blocks of two layers, K and V side by side, as in the arena."""
    return tuple(torch.full((4, 2, 2, kv_heads, BLOCK, dim), float("nan"), device=device)[:, 1].unbind(1))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"),
    [(4, 2, 32, 8), (6, 2, 24, 24), (3, 3, 64, 0), (8, 1, 256, 64), (40, 8, 128, 128)],
    ids=str,
)
@pytest.mark.parametrize("unit_offset", [None, False, True], ids=("plain", "norm", "unit-offset"))
@pytest.mark.parametrize("options", [{}, {"together": True, "warps": 1}], ids=("few tokens", "many tokens"))
def test_equals_the_reference(
    heads: int, kv_heads: int, dim: int, rotary: int, unit_offset: bool | None, options: dict[str, int], device: str
) -> None:
    torch.manual_seed(0)
    q, k, v = fused(*(torch.randn(5, h, dim, device=device) for h in (heads, kv_heads, kv_heads)))
    norms = [None, None]
    if unit_offset is not None:
        norms = [HeadNorm(torch.randn(dim, device=device), eps, unit_offset) for eps in (1e-3, 1e-2)]
    angles = (None, None)
    if rotary:
        positions = torch.tensor([0, 1, 7, 1000, 262143], device=device)
        angles = rotary_angles(positions, inverse_frequencies(rotary, 1e7, device))
    slots = torch.tensor([17, -1, 0, 63, -1], device=device)
    mine, theirs = caches(kv_heads, dim, device), caches(kv_heads, dim, device)
    got = fast.attention_inputs(q, k, v, *norms, *angles, *mine, slots, **options)
    expected = reference.attention_inputs(q, k, v, *norms, *angles, *theirs, slots)
    assert relative_error(got, expected) < 1e-6
    for a, b in zip(mine, theirs, strict=True):
        written = b.isfinite()
        assert written.sum() == 3 * kv_heads * dim
        assert a.isfinite().equal(written)
        assert relative_error(a[written], b[written]) < 1e-6


def test_without_norm_and_angles_q_stays_where_it_is(device: str) -> None:
    q, k = torch.randn(2, 4, 16, device=device), torch.randn(2, 2, 16, device=device)
    got = fast.attention_inputs(
        q, k, k, None, None, None, None, *caches(2, 16, device), torch.tensor([0, 1], device=device)
    )
    assert got is q


@pytest.mark.parametrize("normed", [False, True])
def test_either_side_alone(normed: bool, device: str) -> None:
    q, k, v = fused(*(torch.randn(3, h, 32, device=device) for h in (4, 2, 2)))
    norm = HeadNorm(torch.randn(32, device=device), 1e-3, False) if normed else None
    angles = rotary_angles(torch.tensor([0, 7, 90], device=device), inverse_frequencies(8, 1e7, device))
    slots = torch.tensor([3, -1, 60], device=device)
    whole, alone = caches(2, 32, device), caches(2, 32, device)
    both = fast.attention_inputs(q, k, v, norm, norm, *angles, *whole, slots)
    assert fast.attention_inputs(q, None, None, norm, None, *angles, *alone, None).equal(both)
    assert all(cache.isnan().all() for cache in alone)
    assert fast.attention_inputs(None, k, v, None, norm, *angles, *alone, slots) is None
    for a, b in zip(alone, whole, strict=True):
        assert a.nan_to_num(7.0).equal(b.nan_to_num(7.0))
    assert fast.attention_inputs(q, None, None, None, None, None, None, *alone, None) is q
