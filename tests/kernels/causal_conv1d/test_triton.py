import pytest
import torch

from tests.kernels.varlen import SPLITS, bools, cu, fused, nan_pool, relative_error, rows
from twinflow.kernels.causal_conv1d import reference

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.causal_conv1d import triton as fast  # noqa: E402

C, W = 40, 4


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("lens", [(1,), (2,), (63,), (64, 1, 3), (1, 65, 2, 1, 130), (1, 1, 1), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=("", "bias"))
def test_equals_the_reference(lens: tuple[int, ...], width: int, bias: bool, device: str) -> None:
    torch.manual_seed(0)
    n = len(lens)
    x = fused(torch.randn(sum(lens), C, device=device))[0]
    w, b = torch.randn(C, width, device=device), torch.randn(C, device=device) if bias else None
    at = torch.randperm(8)[:n].to(device)
    fresh = (torch.arange(n) % 2 == 1).to(device)
    mine = torch.randn(8, 2, C, width - 1, device=device)[:, 1]
    mine[at[fresh]] = float("nan")
    theirs = mine.clone()
    for activation in (True, False):
        args = (at, fresh, cu(lens).to(device), lens, activation)
        got, expected = (f.causal_conv1d(x, w, b, s, *args) for f, s in ((fast, mine), (reference, theirs)))
        assert relative_error(got, expected) < 1e-6
        assert mine.equal(theirs)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_gives_the_same(split: tuple[int, ...], device: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(129, C).half().to(device), torch.randn(C, W).to(device)
    whole, parts = (nan_pool(2, C, W - 1, dtype=torch.float16).to(device) for _ in range(2))

    def run(piece: torch.Tensor, state: torch.Tensor, fresh: bool) -> torch.Tensor:
        lens = (len(piece),)
        at = rows(1).to(device)
        return fast.causal_conv1d(piece, w, None, state, at, bools(fresh).to(device), cu(lens).to(device), lens)

    expected = run(x, whole, True)
    got = [run(piece, parts, i == 0) for i, piece in enumerate(x.split(list(split)))]
    assert relative_error(torch.cat(got), expected) < 1e-3
    assert parts[1].equal(whole[1])
    assert parts[0].isnan().all()


@pytest.mark.parametrize("lens", [(1, 1, 1), (4, 1, 5)], ids=str)
def test_padding_rows_read_and_write_nothing(lens: tuple[int, ...], device: str) -> None:
    torch.manual_seed(0)
    x, w, state = torch.randn(sum(lens), C, device=device), torch.randn(C, W, device=device), nan_pool(2, C, W - 1)
    state = state.to(device)
    at, fresh = rows(-1, 1, -1).to(device), bools(False, True, False).to(device)
    y = fast.causal_conv1d(x, w, None, state, at, fresh, cu(lens).to(device), lens)
    assert y.isfinite().all()
    assert state[0].isnan().all()
    assert state[1].isfinite().all()
