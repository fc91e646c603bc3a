from dataclasses import dataclass

import pytest
import torch

from tests.kernels.varlen import SPLITS, bools, cu, fused, nan_pool, relative_error, rows
from twinflow.kernels.gated_delta_rule import reference

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.gated_delta_rule import triton as fast  # noqa: E402

HK, HV, K, V = 1, 2, 16, 24


@dataclass
class Inputs:
    """q, k, v inside one projection, a, b inside another, and the heads' constants."""

    tensors: list[torch.Tensor]
    heads: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def random(
        cls,
        tokens: int,
        device: str,
        dtype: torch.dtype = torch.float32,
        k_dim: int = K,
        v_dim: int = V,
        key_heads: int = HK,
        heads: int = HV,
    ) -> "Inputs":
        torch.manual_seed(0)
        keys, values, gates = (tokens, key_heads, k_dim), (tokens, heads, v_dim), (tokens, heads)
        drawn = [torch.randn(s).to(dtype).to(device) for s in (keys, keys, values, gates, gates)]
        constants = torch.rand(heads).mul(15).add(1).log(), torch.empty(heads).uniform_(-4, 1)
        return cls(fused(*drawn[:3]) + fused(*drawn[3:]), tuple(c.to(device) for c in constants))

    def split(self, lens: tuple[int, ...]) -> list["Inputs"]:
        return [Inputs(list(p), self.heads) for p in zip(*(t.split(lens) for t in self.tensors), strict=True)]

    def run(self, ops, state: torch.Tensor, lens: tuple[int, ...], at, fresh, **options) -> torch.Tensor:
        to = state.device
        where = (state, at.to(to), fresh.to(to), cu(lens).to(to), lens)
        return ops.gated_delta(*self.tensors, *self.heads, *where, **options)

    def float(self) -> "Inputs":
        return Inputs([t.float() for t in self.tensors], self.heads)


def both(x: Inputs, state: torch.Tensor, lens: tuple[int, ...], at, fresh) -> tuple[torch.Tensor, ...]:
    """Outputs and states of the kernel and of the reference."""
    mine, theirs = state.clone(), state.clone()
    return x.run(fast, mine, lens, at, fresh), x.run(reference, theirs, lens, at, fresh), mine, theirs


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 129])
@pytest.mark.parametrize("fresh", [True, False], ids=("fresh", "resumed"))
def test_one_sequence(tokens: int, fresh: bool, device: str) -> None:
    x, state = Inputs.random(tokens, device), nan_pool(3, HV, V, K).to(device)
    if not fresh:
        state[1] = torch.randn(HV, V, K)
    got, expected, mine, theirs = both(x, state, (tokens,), rows(1), bools(fresh))
    assert relative_error(got, expected) < 1e-5
    assert relative_error(mine[1], theirs[1]) < 1e-5
    assert mine[[0, 2]].isnan().all()


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_gives_the_same(split: tuple[int, ...], device: str) -> None:
    x, whole, parts = Inputs.random(129, device), nan_pool(1, HV, V, K).to(device), nan_pool(2, HV, V, K).to(device)
    expected = x.run(reference, whole, (129,), rows(0), bools(True))
    pieces = x.split(split)
    got = [p.run(fast, parts, (n,), rows(1), bools(i == 0)) for i, (n, p) in enumerate(zip(split, pieces, strict=True))]
    assert relative_error(torch.cat(got), expected) < 1e-5
    assert relative_error(parts[1], whole[0]) < 1e-5


@pytest.mark.parametrize("lens", [(1, 65, 1, 3, 1), (1, 1, 1, 1, 1), (70, 2, 64, 9, 130), (5, 0, 1, 70, 0)], ids=str)
def test_a_packed_batch(lens: tuple[int, ...], device: str) -> None:
    x, state = Inputs.random(sum(lens), device), torch.randn(8, HV, V, K).to(device)
    at, fresh = rows(5, 0, 3, 7, 2), bools(False, False, True, False, False)
    got, expected, mine, theirs = both(x, state, lens, at, fresh)
    assert relative_error(got, expected) < 1e-5
    assert relative_error(mine, theirs) < 1e-5
    assert mine[[1, 4, 6]].equal(state[[1, 4, 6]])


@pytest.mark.parametrize("lens", [(1, 1, 1), (4, 1, 5), (1, 70, 1)], ids=str)
def test_padding_rows_read_and_write_nothing(lens: tuple[int, ...], device: str) -> None:
    x, state = Inputs.random(sum(lens), device), nan_pool(2, HV, V, K).to(device)
    got, expected, mine, theirs = both(x, state, lens, rows(-1, 1, -1), bools(False, True, False))
    assert relative_error(got, expected) < 1e-5
    assert mine[0].isnan().all()
    assert relative_error(mine[1], theirs[1]) < 1e-5


def test_hard_decay_neither_overflows_nor_loses_digits(device: str) -> None:
    x, state = Inputs.random(130, device), nan_pool(1, HV, V, K).to(device)
    x.tensors[3][::3] = 60.0  # decays down to exp(-900)
    got, expected, mine, theirs = both(x, state, (130,), rows(0), bools(True))
    assert relative_error(got, expected) < 1e-5
    assert relative_error(mine, theirs) < 1e-5


def test_repeated_keys(device: str) -> None:
    """Equal keys written at full strength: the case in which a power series for the chunk's inverse would explode."""
    x, state = Inputs.random(128, device), nan_pool(1, HV, V, K).to(device)
    x.tensors[1][:] = x.tensors[1][:1].clone()
    x.tensors[4][:] = 20.0  # beta = 1
    x.tensors[3][:] = -20.0  # no decay
    got, expected, mine, theirs = both(x, state, (128,), rows(0), bools(True))
    assert relative_error(got, expected) < 1e-5
    assert relative_error(mine, theirs) < 1e-5


@pytest.mark.parametrize("k_dim", [8, 40, 128])
def test_other_key_dims(k_dim: int, device: str) -> None:
    x, state = Inputs.random(67, device, k_dim=k_dim), torch.randn(2, HV, V, k_dim).to(device)
    got, expected, mine, theirs = both(x, state, (1, 66), rows(1, 0), bools(False, False))
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


BATCHES = [(2,), (63,), (64,), (65,), (1, 65, 1, 3, 1), (70, 2, 64, 9, 130), (5, 0, 1, 70, 0)]


@pytest.mark.parametrize("lens", BATCHES, ids=str)
def test_chunks_are_exact_in_fp32(lens: tuple[int, ...]) -> None:
    """On the CPU only: what the algorithm gives where products are exact. A GPU takes chunks for half precision."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the accelerator in this process; its interpreter is off")
    x, state, n = Inputs.random(sum(lens), "cpu"), torch.randn(8, HV, V, K), len(lens)
    chunked(x, state, lens, rows(5, 0, 3, 7, 2)[:n], bools(False, False, True, False, False)[:n], 1e-5)


@pytest.mark.parametrize("lens", BATCHES, ids=str)
def test_chunks_in_half_precision(lens: tuple[int, ...], device: str) -> None:
    x, state, n = Inputs.random(sum(lens), device, torch.float16), torch.randn(8, HV, V, K).to(device), len(lens)
    chunked(x, state, lens, rows(5, 0, 3, 7, 2)[:n], bools(False, False, True, False, False)[:n], 3e-3)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_into_chunks_gives_the_same(split: tuple[int, ...], device: str) -> None:
    x, whole, parts = Inputs.random(129, device, torch.float16), *(nan_pool(2, HV, V, K).to(device) for _ in range(2))
    expected = x.run(reference, whole, (129,), rows(1), bools(True))
    pieces = x.split(split)
    got = [
        p.run(fast, parts, (n,), rows(1), bools(i == 0), chunked=True)
        for i, (n, p) in enumerate(zip(split, pieces, strict=True))
    ]
    assert relative_error(torch.cat(got), expected) < 3e-3
    assert relative_error(parts[1], whole[1]) < 3e-3
    assert parts[0].isnan().all()


def test_chunks_with_hard_decay_and_repeated_keys(device: str) -> None:
    x, state = Inputs.random(260, device, torch.float16), nan_pool(1, HV, V, K).to(device)
    x.tensors[3][:100:3] = 60.0  # decays down to exp(-900)
    x.tensors[1][100:] = x.tensors[1][100:101].clone()
    x.tensors[4][100:] = 20.0  # beta = 1
    x.tensors[3][100:] = -20.0  # no decay
    chunked(x, state, (260,), rows(0), bools(True), 3e-3)


def test_rows_of_padding_in_chunks(device: str) -> None:
    x, state = Inputs.random(72, device, torch.float16), nan_pool(2, HV, V, K).to(device)
    got = x.run(fast, state, (1, 70, 1), rows(-1, -1, 1), bools(False, False, True))
    assert got.isfinite().all()
    assert state[0].isnan().all()
    assert state[1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("lens", [(500,), (1000,), (1, 64, 65, 0, 1000, 63, 130)], ids=str)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(128, 128), (64, 64), (256, 128), (96, 192)], ids=str)
def test_shapes_of_models(dtype: torch.dtype, tolerance: float, lens: tuple[int, ...], k_dim: int, v_dim: int) -> None:
    x = Inputs.random(sum(lens), "cuda", dtype, k_dim, v_dim, key_heads=2, heads=4)
    state, n = torch.randn(len(lens), 2, 4, v_dim, k_dim, device="cuda")[:, 1], len(lens)
    chunked(x, state, lens, torch.randperm(n), torch.arange(n) % 2 == 1, tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("share", [24, 12, 4], ids=("tiles of 32", "tiles of 64", "tiles of 128"))
def test_as_many_programs_as_fit(share: int) -> None:
    """Batches so large that the scan takes each of its widths of tiles."""
    lens = (65, 100, 2) * (torch.cuda.get_device_properties("cuda").multi_processor_count // (3 * share))
    x = Inputs.random(sum(lens), "cuda", torch.bfloat16, 128, 128, key_heads=2, heads=4)
    state = torch.randn(len(lens), 4, 128, 128, device="cuda")
    chunked(x, state, lens, torch.randperm(len(lens)), torch.arange(len(lens)) % 2 == 1, 1e-2)


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("chunks", [True, False], ids=("chunks", "tokens"))
def test_half_precision_inputs_and_state(tokens: int, chunks: bool, device: str) -> None:
    x, state = Inputs.random(tokens, device, torch.float16), torch.randn(1, HV, V, K).half().to(device)
    mine, theirs, lens, at, no = state.clone(), state.clone(), (tokens,), rows(0), bools(False)
    got = x.run(fast, mine, lens, at, no, chunked=chunks)
    expected = x.run(reference, theirs, lens, at, no)
    assert relative_error(got, expected) < 3e-3
    assert relative_error(mine, theirs) < 3e-3
