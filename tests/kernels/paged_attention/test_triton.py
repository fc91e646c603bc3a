from dataclasses import dataclass

import pytest
import torch

from tests.kernels.varlen import cu, fused, relative_error
from twinflow.kernels.paged_attention import reference

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.paged_attention import decode  # noqa: E402
from twinflow.kernels.paged_attention import triton as fast  # noqa: E402


@dataclass
class Case:
    """Sequences with `context` keys each, of which the last `queries` attend; blocks scattered, the rest NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    contexts: torch.Tensor
    lens: tuple[int, ...]

    @classmethod
    def random(
        cls, work: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block: int, device: str, **options
    ) -> "Case":
        """`work`: (context, queries) of each sequence."""
        torch.manual_seed(0)
        dtype = options.get("dtype", torch.float32)
        width = max(1, max(-(-c // block) for c, _ in work)) + 1
        units = len(work) * width + 1
        k, v = torch.full((2, units, 3, kv_heads, block, dim), float("nan"), dtype=dtype)
        k, v = k[:, 0], v[:, 1]  # a gap between blocks, as in the arena
        order = (torch.randperm(units - 1) + 1).view(len(work), width).to(torch.int32)
        for i, (context, _) in enumerate(work):
            at = torch.arange(context)
            where = order[i].long()[at // block], slice(None), at % block
            k[where], v[where] = (torch.randn(context, kv_heads, dim).to(dtype) for _ in range(2))
            order[i, -(-context // block) :] = -1
        lens = tuple(n for _, n in work)
        q = fused(torch.randn(sum(lens), heads, dim).to(dtype))[0]
        contexts = torch.tensor([c for c, _ in work], dtype=torch.int32)
        return cls(*(t.to(device) for t in (q, k, v, order, contexts)), lens)

    def run(self, ops) -> torch.Tensor:
        lens = cu(self.lens).to(self.q.device)
        scale = self.q.shape[-1] ** -0.5
        return ops.paged_attention(self.q, self.k, self.v, self.tables, self.contexts, lens, self.lens, scale)


DECODE = [(1, 1), (16, 1), (17, 1), (100, 1), (0, 1), (300, 1)]
PREFILL = [(2, 2), (15, 15), (16, 16), (63, 63), (100, 100)]
MIXED = [(40, 1), (1, 1), (20, 20), (70, 33), (16, 1), (0, 3), (129, 2), (64, 0), (65, 65)]


@pytest.mark.parametrize("work", [DECODE, PREFILL, MIXED], ids=("decode", "prefill", "mixed"))
@pytest.mark.parametrize("block", [16, 24, 64])
def test_equals_the_reference(work: list[tuple[int, int]], block: int, device: str) -> None:
    case = Case.random(work, 4, 2, 32, block, device)
    assert relative_error(case.run(fast), case.run(reference)) < 1e-5


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 64), (6, 2, 80), (8, 1, 128), (5, 1, 256), (32, 1, 8)], ids=str
)
def test_head_shapes(heads: int, kv_heads: int, dim: int, device: str) -> None:
    case = Case.random([(70, 1), (90, 33)], heads, kv_heads, dim, 32, device)
    assert relative_error(case.run(fast), case.run(reference)) < 1e-5


@pytest.mark.parametrize("splits", [1, 2, 8, 32])
@pytest.mark.parametrize("mixed", [False, True], ids=("all one", "mixed"))
def test_any_number_of_splits_gives_the_same(splits: int, mixed: bool, device: str) -> None:
    case = Case.random([*DECODE, (9, 2)] if mixed else DECODE, 4, 2, 32, 16, device)
    expected = case.run(reference)
    got = torch.full_like(expected, float("nan"))
    where = (case.k, case.v, case.tables, case.contexts, cu(case.lens).to(device))
    decode.attend_one_query(case.q, *where, 32**-0.5, got, all_one=not mixed, programs=splits)
    assert relative_error(got[: len(DECODE)], expected[: len(DECODE)]) < 1e-5
    assert got[len(DECODE) :].isnan().all()


def test_padding_sequences_give_zero(device: str) -> None:
    got = Case.random([(0, 1), (5, 1), (0, 2)], 4, 2, 32, 16, device).run(fast)
    assert got[[0, 2, 3]].eq(0).all()
    assert got[1].ne(0).any()


@pytest.mark.parametrize("work", [DECODE, MIXED], ids=("decode", "mixed"))
def test_half_precision(work: list[tuple[int, int]], device: str) -> None:
    case = Case.random(work, 4, 2, 32, 16, device, dtype=torch.float16)
    assert relative_error(case.run(fast), case.run(reference)) < 2e-3


def test_splits_follow_the_batch() -> None:
    assert decode.choose_splits(1024, 65536, 64, 132) == 1
    assert decode.choose_splits(32, 32768, 64, 132) == 16
    assert decode.choose_splits(4, 262144, 64, 132) == 64
    assert decode.choose_splits(4, 64, 64, 132) == 1
