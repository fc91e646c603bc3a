import pytest
import torch

from tests.kernels.varlen import bools, fused, nan_pool, relative_error, rows
from twinflow.kernels.gated_delta_rule import reference

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.gated_delta_rule import decode as fast  # noqa: E402


def inputs(
    sequences: int, heads: tuple[int, int], k_dim: int, v_dim: int, taps: int, dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """mixed, z, a, b inside one projection; weights and states, the states with a gap between rows."""
    torch.manual_seed(0)
    keys, values, n = heads[0] * k_dim, heads[1] * v_dim, sequences
    drawn = [
        torch.randn(n, width, device=device).to(dtype) for width in (2 * keys + values, values, heads[1], heads[1])
    ]
    conv = torch.randn(2 * keys + values, taps, device=device).to(dtype)
    conv_state = torch.randn(n + 1, 2, 2 * keys + values, taps - 1, device=device).to(dtype)[:, 1]
    a_log = torch.rand(heads[1], device=device).mul(15).add(1).log()
    dt_bias = torch.empty(heads[1], device=device).uniform_(-4, 1)
    state = torch.randn(n + 1, 2, heads[1], v_dim, k_dim, device=device)[:, 1]
    return [*fused(*drawn), conv, conv_state, a_log, dt_bias, state, torch.randn(v_dim, device=device).to(dtype)]


def compare(x: list[torch.Tensor], at: torch.Tensor, fresh: torch.Tensor, tolerance: float) -> list[torch.Tensor]:
    """Runs both; returns the inputs with the kernel's states."""
    device = x[0].device
    theirs = [*x[:5], x[5].clone(), *x[6:8], x[8].clone(), x[9]]
    where = (at.to(device), fresh.to(device), 1e-6)
    got, expected = fast.gated_delta_decode(*x, *where), reference.gated_delta_decode(*theirs, *where)
    kept = at[at >= 0].to(device)
    assert relative_error(got, expected) < tolerance
    assert x[5][kept].equal(theirs[5][kept])
    assert relative_error(x[8][kept], theirs[8][kept]) < tolerance
    return x


@pytest.mark.parametrize("heads", [(1, 1), (1, 2), (2, 6)], ids=str)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(16, 24), (40, 16)], ids=str)
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_equals_the_reference(heads: tuple[int, int], k_dim: int, v_dim: int, taps: int, device: str) -> None:
    x = inputs(4, heads, k_dim, v_dim, taps, torch.float32, device)
    compare(x, rows(3, 0, 4, 2), bools(False, True, False, False), 1e-5)


def test_padding_and_fresh_rows(device: str) -> None:
    x = inputs(3, (2, 4), 16, 16, 4, torch.float32, device)
    x[5], x[8] = nan_pool(3, *x[5].shape[1:]).to(device), nan_pool(3, *x[8].shape[1:]).to(device)
    compare(x, rows(-1, 1, -1), bools(False, True, True), 1e-5)
    for state in (x[5], x[8]):
        assert state[[0, 2]].isnan().all()
        assert state[1].isfinite().all()


def test_steps_follow_each_other(device: str) -> None:
    x = inputs(3, (2, 6), 16, 24, 4, torch.float32, device)
    for _ in range(3):
        compare(x, rows(1, 3, 0), bools(False, False, False), 1e-5)


def test_half_precision_state(device: str) -> None:
    x = inputs(2, (1, 2), 16, 16, 4, torch.float16, device)
    x[8] = x[8].half()
    compare(x, rows(2, 0), bools(False, False), 5e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("sequences", [1, 7, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_shapes_of_models(sequences: int, dtype: torch.dtype, tolerance: float) -> None:
    x = inputs(sequences, (4, 8), 128, 128, 4, dtype, "cuda")
    compare(x, torch.randperm(sequences + 1)[:sequences], torch.arange(sequences) % 3 == 2, tolerance)
