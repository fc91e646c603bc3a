import pytest
import torch

from tests.kernels.varlen import relative_error
from twinflow.kernels.linear import reference

pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.linear import hopper
from twinflow.kernels.linear.tiles import Tile

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper card")


def run(tokens: int, rows: int, inner: int, tile: Tile, dtype: torch.dtype, gated: bool) -> float:
    x = torch.randn(tokens, inner + 64, device="cuda").to(dtype)[:, 64:]
    weight = (torch.randn(rows * (1 + gated), inner, device="cuda") / inner**0.5).to(dtype)
    shape = (tokens, rows) if tile.parts == 1 else (tile.parts, tokens, rows)
    out = torch.full(shape, float("nan"), dtype=dtype if tile.parts == 1 else torch.float32, device="cuda")
    hopper.project(x, weight, out, tile, gated=gated)
    expected = (reference.linear_swiglu if gated else reference.linear)(x.float(), weight.float())
    return relative_error((out if tile.parts == 1 else out.sum(0)).float(), expected)


@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("rows", "inner"), [(64, 128), (200, 640), (2560, 4096)], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)], ids=str)
def test_it_equals_the_reference(
    tokens: int, rows: int, inner: int, gated: bool, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    width = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    assert run(tokens, rows, inner, Tile(64, 64, width, 64, 4, 4), dtype, gated) < tolerance


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("stages", [2, 5, 6])
def test_parts_and_more_stages_than_pieces(parts: int, stages: int) -> None:
    torch.manual_seed(0)
    for inner in (384, 1280):
        assert run(9, 130, inner, Tile(64, 64, 16, 128, stages, 4, parts), torch.bfloat16, False) < 5e-3


def test_it_waits_for_what_it_reads() -> None:
    """Tokens written by the kernel right in front, many times over, in a graph."""
    torch.manual_seed(0)
    weight = (torch.randn(4096, 2048, device="cuda") / 45).bfloat16()
    source, x = torch.randn(50, 8, 2048, device="cuda").bfloat16(), torch.zeros(8, 2048, device="cuda").bfloat16()
    outs = [torch.zeros(8, 4096, dtype=torch.bfloat16, device="cuda") for _ in source]
    tile = Tile(64, 64, 16, 128, 5, 4)
    hopper.project(x, weight, outs[0], tile, gated=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one, out in zip(source, outs, strict=True):
            torch.mul(one, 2, out=x)
            hopper.project(x, weight, out, tile, gated=False)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for one, out in zip(source, outs, strict=True):
        assert relative_error(out.float(), reference.linear(2 * one.float(), weight.float())) < 1e-2
