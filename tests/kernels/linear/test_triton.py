import pytest
import torch

from tests.kernels.varlen import fused, relative_error
from twinflow.kernels.linear import reference

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.linear import triton as fast  # noqa: E402
from twinflow.kernels.linear.tiles import choose_tile  # noqa: E402

HALF, SINGLE = 2e-3, 1e-6


def weights(rows: int, inner: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (torch.randn(rows, inner) / inner**0.5).to(dtype).to(device)


def strided(tokens: int, inner: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows of a wider tensor, NaN around them."""
    return fused(torch.randn(tokens, inner).to(dtype).to(device))[0]


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 64, 65])
@pytest.mark.parametrize(("rows", "inner"), [(200, 256), (96, 384), (33, 128), (1000, 128)], ids=str)
def test_half_precision(tokens: int, rows: int, inner: int, device: str) -> None:
    torch.manual_seed(0)
    x, weight = strided(tokens, inner, torch.float16, device), weights(rows, inner, torch.float16, device)
    got = fast.linear(x, weight)
    assert got.shape == (tokens, rows) and got.is_contiguous()
    assert relative_error(got, reference.linear(x.float(), weight.float()).half()) < HALF


@pytest.mark.parametrize("tokens", [1, 17, 64, 65])
@pytest.mark.parametrize(("rows", "inner"), [(96, 256), (333, 128)], ids=str)
def test_swiglu_in_half_precision(tokens: int, rows: int, inner: int, device: str) -> None:
    torch.manual_seed(0)
    x, weight = strided(tokens, inner, torch.float16, device), weights(2 * rows, inner, torch.float16, device)
    got = fast.linear_swiglu(x, weight)
    assert got.shape == (tokens, rows) and got.is_contiguous()
    assert relative_error(got, reference.linear_swiglu(x.float(), weight.float()).half()) < HALF


@pytest.mark.parametrize(("rows", "inner"), [(70, 48), (64, 33), (5, 160)], ids=str)
def test_single_precision_and_lengths_that_fit_no_tile(rows: int, inner: int, device: str) -> None:
    torch.manual_seed(0)
    x, weight = strided(37, inner, torch.float32, device), weights(2 * rows, inner, torch.float32, device)
    assert relative_error(fast.linear(x, weight), reference.linear(x, weight)) < SINGLE
    assert relative_error(fast.linear_swiglu(x, weight), reference.linear_swiglu(x, weight)) < SINGLE


def test_a_token_does_not_see_its_neighbours(device: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(70, 96).to(device), weights(130, 96, torch.float32, device)
    together = fast.linear(x, weight)
    for part in (slice(0, 1), slice(3, 36), slice(69, 70)):
        alone = fast.linear(x[part], weight)
        # The interpreter multiplies through a library that adds up in an order of its own.
        assert alone.equal(together[part]) if device == "cuda" else relative_error(alone, together[part]) < SINGLE


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_result_may_be_wider(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x, weight = strided(3, 256, dtype, device), weights(50, 256, dtype, device)
    got = fast.linear(x, weight, torch.float32)
    assert got.dtype == torch.float32
    assert relative_error(got, reference.linear(x.float(), weight.float())) < (
        SINGLE if dtype == torch.float32 else 1e-4
    )


def test_no_tokens(device: str) -> None:
    x, weight = torch.empty(0, 128, device=device), weights(8, 128, torch.float32, device)
    assert fast.linear(x, weight).shape == (0, 8)
    assert fast.linear_swiglu(x, weight).shape == (0, 4)


@pytest.mark.parametrize("tokens", [2, 17, 64, 100])
@pytest.mark.parametrize(("rows", "inner"), [(64, 2048), (100, 1152), (70, 128)], ids=str)
def test_the_residual_and_what_is_added_to_it(tokens: int, rows: int, inner: int, device: str) -> None:
    torch.manual_seed(0)
    x, weight = strided(tokens, inner, torch.float16, device), weights(rows, inner, torch.float16, device)
    residual = torch.randn(tokens, rows).half().to(device)
    expected = residual.float() + reference.linear(x.float(), weight.float())
    left, added = fast.linear_residual(x, weight, residual.clone())
    if added is None:
        assert tokens > 64
        assert relative_error(left, expected.half()) < HALF
        return
    assert left.equal(residual)
    if inner > 1000:
        assert added.ndim == 3 and added.dtype == torch.float32
        assert relative_error(left.float() + added.sum(0), expected) < 1e-4
    else:
        assert relative_error(left + added, expected.half()) < HALF


@pytest.mark.parametrize("tokens", [1, 3, 65])
def test_logits_go_where_they_are_wanted(tokens: int, device: str) -> None:
    torch.manual_seed(0)
    x, weight = strided(tokens, 256, torch.float16, device), weights(200, 256, torch.float16, device)
    if device == "cpu" and tokens > 64:
        pytest.skip("the library's product with a wider result is one of GPUs")
    room = torch.full((tokens, 200), float("nan"), device=device)
    assert fast.linear(x, weight, torch.float32, room).data_ptr() == room.data_ptr()
    assert relative_error(room, reference.linear(x.float(), weight.float())) < 1e-4


def shapes() -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("rows", "inner"), [(12352, 2560), (2560, 4096), (2560, 9216), (151936, 2560), (40, 128)], ids=str
    )


@shapes()
@pytest.mark.parametrize("tokens", [2, 16, 33, 64])
@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10], ids=["Ada", "Ampere", "Hopper"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_tiles_fit(tokens: int, rows: int, inner: int, shared: int, gated: bool) -> None:
    tile = choose_tile(tokens, rows, inner, gated=gated, partial=not gated, multiprocessors=132, shared_bytes=shared)
    assert tile is not None
    assert tile.rows <= tile.padded and tile.tokens >= tokens and inner % tile.inner == 0
    programs = 2 if tile.parts == 1 else 1
    assert programs * tile.stages * ((1 + gated) * tile.padded + tile.tokens) * tile.inner * 2 <= shared
    assert tile.parts <= inner // tile.inner


@shapes()
def test_programs_fill_the_card_once(rows: int, inner: int) -> None:
    tile = choose_tile(8, rows, inner, gated=False, partial=True, multiprocessors=132, shared_bytes=227 << 10)
    assert tile is not None
    programs = -(-rows // tile.rows) * tile.parts
    assert programs > 264 if rows > 264 * 64 else programs <= 264


def test_what_is_left_to_the_library() -> None:
    options = {"gated": False, "partial": False, "multiprocessors": 132, "shared_bytes": 227 << 10}
    assert choose_tile(65, 2560, 4096, **options) is None
    assert choose_tile(8, 2560, 100, **options) is None
