from dataclasses import dataclass

import pytest
import torch

from tests.kernels.varlen import SPLITS, bools, cu, fused, nan_pool, relative_error, rows
from twinflow.kernels.mamba2_ssd import reference

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.mamba2_ssd import triton as fast  # noqa: E402

H, G, P, N = 4, 2, 24, 16


@dataclass
class Inputs:
    """x, b, c inside one projection, dt, and the heads' constants."""

    tensors: list[torch.Tensor]
    heads: tuple[torch.Tensor, ...]

    @classmethod
    def random(
        cls,
        tokens: int,
        device: str,
        dtype: torch.dtype = torch.float32,
        groups: int = G,
        heads: int = H,
        dims: tuple[int, int] = (P, N),
    ) -> "Inputs":
        torch.manual_seed(0)
        shapes = ((tokens, heads, dims[0]), (tokens, groups, dims[1]), (tokens, groups, dims[1]), (tokens, heads))
        values = [torch.randn(s).to(dtype).to(device) for s in shapes]
        constants = torch.rand(heads).mul(15).add(1).log(), torch.empty(heads).uniform_(-4, 1), torch.randn(heads)
        return cls(fused(*values[:3]) + fused(values[3]), tuple(c.to(device) for c in constants))

    def split(self, lens: tuple[int, ...]) -> list["Inputs"]:
        return [Inputs(list(p), self.heads) for p in zip(*(t.split(lens) for t in self.tensors), strict=True)]

    def run(self, ops, state: torch.Tensor, lens: tuple[int, ...], at, fresh, **options) -> torch.Tensor:
        to = state.device
        where = (state, at.to(to), fresh.to(to), cu(lens).to(to), lens)
        return ops.mamba2_ssd(*self.tensors, *self.heads, *where, **options)

    def float(self) -> "Inputs":
        return Inputs([t.float() for t in self.tensors], self.heads)


def both(x: Inputs, state: torch.Tensor, lens: tuple[int, ...], at, fresh) -> tuple[torch.Tensor, ...]:
    """Outputs and states of the kernel and of the reference."""
    mine, theirs = state.clone(), state.clone()
    return x.run(fast, mine, lens, at, fresh), x.run(reference, theirs, lens, at, fresh), mine, theirs


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 129])
@pytest.mark.parametrize("fresh", [True, False], ids=("fresh", "resumed"))
def test_one_sequence(tokens: int, fresh: bool, device: str) -> None:
    x, state = Inputs.random(tokens, device), nan_pool(3, H, P, N).to(device)
    if not fresh:
        state[1] = torch.randn(H, P, N)
    got, expected, mine, theirs = both(x, state, (tokens,), rows(1), bools(fresh))
    assert relative_error(got, expected) < 1e-5
    assert relative_error(mine[1], theirs[1]) < 1e-5
    assert mine[[0, 2]].isnan().all()


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_gives_the_same(split: tuple[int, ...], device: str) -> None:
    x, whole, parts = Inputs.random(129, device), nan_pool(1, H, P, N).to(device), nan_pool(2, H, P, N).to(device)
    expected = x.run(reference, whole, (129,), rows(0), bools(True))
    pieces = x.split(split)
    got = [p.run(fast, parts, (n,), rows(1), bools(i == 0)) for i, (n, p) in enumerate(zip(split, pieces, strict=True))]
    assert relative_error(torch.cat(got), expected) < 1e-5
    assert relative_error(parts[1], whole[0]) < 1e-5


@pytest.mark.parametrize("groups", [1, 2, H])
@pytest.mark.parametrize("lens", [(1, 65, 1, 3, 1), (1, 1, 1, 1, 1), (70, 2, 64, 0, 1)], ids=str)
def test_a_packed_batch(lens: tuple[int, ...], groups: int, device: str) -> None:
    x, state = Inputs.random(sum(lens), device, groups=groups), torch.randn(8, H, P, N).to(device)
    at, fresh = rows(5, 0, 3, 7, 2), bools(False, True, True, False, False)
    got, expected, mine, theirs = both(x, state, lens, at, fresh)
    assert relative_error(got, expected) < 1e-5
    assert relative_error(mine, theirs) < 1e-5
    assert mine[[1, 4, 6]].equal(state[[1, 4, 6]])


@pytest.mark.parametrize("lens", [(1, 1, 1), (4, 1, 5)], ids=str)
def test_padding_rows_read_and_write_nothing(lens: tuple[int, ...], device: str) -> None:
    x, state = Inputs.random(sum(lens), device), nan_pool(2, H, P, N).to(device)
    got, expected, mine, theirs = both(x, state, lens, rows(-1, 1, -1), bools(False, True, False))
    assert relative_error(got, expected) < 1e-5
    assert mine[0].isnan().all()
    assert relative_error(mine[1], theirs[1]) < 1e-5


@pytest.mark.parametrize("step", [60.0, -9.0], ids=("hard decay", "small steps"))
def test_extreme_steps(step: float, device: str) -> None:
    x, state = Inputs.random(130, device), nan_pool(1, H, P, N).to(device)
    x.tensors[3][::3] = step
    got, expected, mine, theirs = both(x, state, (130,), rows(0), bools(True))
    assert relative_error(got, expected) < 1e-5
    assert relative_error(mine, theirs) < 1e-5


def chunked(x: Inputs, state: torch.Tensor, lens: tuple[int, ...], at, fresh, tolerance: float) -> None:
    """In chunks the same as the reference in fp32 from the same inputs, for sequences of more than one token."""
    mine, theirs = state.clone(), state.clone()
    got = x.run(fast, mine, lens, at, fresh, chunked=True)
    expected = x.float().run(reference, theirs, lens, at, fresh).to(got.dtype)
    assert relative_error(got, expected) < tolerance
    kept = at[at >= 0].to(state.device)
    assert relative_error(mine[kept], theirs[kept]) < tolerance


BATCHES = [(2,), (64,), (65,), (1, 65, 1, 3, 1), (70, 2, 64, 0, 130)]


@pytest.mark.parametrize("lens", BATCHES, ids=str)
def test_chunks_are_exact_in_fp32(lens: tuple[int, ...]) -> None:
    """On the CPU only: what the algorithm gives where products are exact. A GPU takes chunks for half precision."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the accelerator in this process; its interpreter is off")
    x, state, n = Inputs.random(sum(lens), "cpu"), torch.randn(8, H, P, N), len(lens)
    chunked(x, state, lens, rows(5, 0, 3, 7, 2)[:n], bools(False, False, True, False, False)[:n], 1e-5)


@pytest.mark.parametrize("groups", [1, 2, H])
@pytest.mark.parametrize("lens", BATCHES, ids=str)
def test_chunks_in_half_precision(lens: tuple[int, ...], groups: int, device: str) -> None:
    x, n = Inputs.random(sum(lens), device, torch.float16, groups), len(lens)
    state = torch.randn(8, H, P, N).to(device)
    chunked(x, state, lens, rows(5, 0, 3, 7, 2)[:n], bools(False, False, True, False, False)[:n], 3e-3)


@pytest.mark.parametrize("step", [60.0, -9.0], ids=("hard decay", "small steps"))
def test_chunks_with_extreme_steps(step: float, device: str) -> None:
    x, state = Inputs.random(130, device, torch.float16), nan_pool(1, H, P, N).to(device)
    x.tensors[3][::3] = step
    chunked(x, state, (130,), rows(0), bools(True), 3e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("lens", [(500,), (1, 64, 65, 0, 1000, 63, 130)], ids=str)
@pytest.mark.parametrize("dims", [(64, 128), (64, 256), (128, 64)], ids=str)
def test_shapes_of_models(dtype: torch.dtype, tolerance: float, lens: tuple[int, ...], dims: tuple[int, int]) -> None:
    x, n = Inputs.random(sum(lens), "cuda", dtype, groups=2, heads=8, dims=dims), len(lens)
    state = torch.randn(n, 2, 8, *dims, device="cuda")[:, 1]
    chunked(x, state, lens, torch.randperm(n), torch.arange(n) % 2 == 1, tolerance)


@pytest.mark.parametrize("tokens", [1, 100])
def test_half_precision_inputs_and_state(tokens: int, device: str) -> None:
    x, state = Inputs.random(tokens, device, torch.float16), torch.randn(1, H, P, N).half().to(device)
    got, expected, mine, theirs = both(x, state, (tokens,), rows(0), bools(False))
    assert relative_error(got, expected) < 3e-3
    assert relative_error(mine, theirs) < 3e-3
