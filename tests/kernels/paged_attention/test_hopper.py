import pytest
import torch

from tests.kernels.paged_attention.test_triton import Case
from tests.kernels.varlen import cu, fused, relative_error
from twinflow.kernels.paged_attention import reference

pytest.importorskip("triton.experimental.gluon", reason="triton is not installed, or too old for Gluon")
from twinflow.kernels.paged_attention import hopper

pytestmark = pytest.mark.gpu

WORK = [(2, 2), (64, 64), (65, 65), (700, 700), (333, 40), (129, 129), (1000, 999), (64, 1), (0, 3), (50, 0)]


@pytest.fixture
def device() -> str:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU")
    return "cuda"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [(16, 4, 256, 64), (8, 8, 128, 64), (6, 2, 64, 128), (32, 1, 128, 64), (5, 1, 256, 64)],
    ids=str,
)
@pytest.mark.parametrize("gated", [False, True], ids=("plain", "gated"))
def test_equals_the_reference(heads: int, kv_heads: int, dim: int, block: int, gated: bool, device: str) -> None:
    case = Case.random(WORK, heads, kv_heads, dim, block, device, dtype=torch.bfloat16)
    gate = fused(torch.randn(len(case.q), heads * dim, dtype=torch.bfloat16, device=device))[0] if gated else None
    expected = case.run(reference, gate)
    got = torch.full_like(expected, float("nan"))
    where = (case.k, case.v, case.tables, case.contexts, cu(case.lens).to(device))
    hopper.attend_many_queries(case.q, *where, dim**-0.5, got, gate=gate)
    one = torch.tensor([n == 1 for n in case.lens for _ in range(n)], device=device)
    assert relative_error(got[~one], expected[~one]) < 1e-2
    assert got[one].isnan().all()


def test_what_it_suits(device: str) -> None:
    def case(work: list[tuple[int, int]], dim: int = 256, block: int = 64, dtype: torch.dtype = torch.bfloat16) -> bool:
        c = Case.random(work, 16, 4, dim, block, device, dtype=dtype)
        return hopper.suits(c.q, c.k, c.v, tuple(n for n in c.lens if n > 1))

    assert case([(2048, 2048)])
    assert not case([(64, 64)])  # too few programs, which share keys instead
    assert not case([(2048, 2048)], dim=96)
    assert not case([(2048, 2048)], block=32)
    assert not case([(2048, 2048)], dtype=torch.float32)
