"""Long stretches of prompts: what is gathered and put together around the library's attention, and the whole on a GPU."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.paged_attention.test_triton import Case
from tests.kernels.varlen import cu, fused, relative_error
from twinflow.kernels.paged_attention import reference

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.paged_attention import library  # noqa: E402
from twinflow.kernels.paged_attention import triton as fast  # noqa: E402
from twinflow.kernels.paged_attention.library import Library  # noqa: E402


def attend_here(
    _: Library, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the library computes, in fp32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    y = (scores.softmax(-1) @ v).to(q.dtype)
    return y.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(-1, keepdim=True)


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[None]:
    """The same ways with lengths that an interpreter manages; on a CPU with the library's part in torch."""
    if device != "cpu":
        yield
        return
    for name, value in (("LONG", 9), ("SQUARE", 8), ("BEFORE", 16), ("_attend", attend_here)):
        monkeypatch.setattr(library, name, value)
    fast._runs.cache_clear()
    yield
    fast._runs.cache_clear()


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("block", [16, 24])
@pytest.mark.parametrize("name", Library)
def test_equals_the_reference(name: Library, block: int, gated: bool, device: str) -> None:
    """From nothing, behind a whole and a broken part, beside short ones and padding."""
    if device != "cpu" and (reason := library.why_not(name, torch.device(device))):
        pytest.skip(f"{name}: {reason}")
    work = [(9, 9), (3, 1), (16, 16), (28, 12), (48, 16), (61, 27), (40, 8), (0, 1), (50, 2)]
    dtype, tolerance = torch.float16, 2e-3
    if device != "cpu":
        long = library.LONG
        work = [(long, long), (3, 1), (long + 7, long), (2 * long, long), (long + 5000, long + 100), (700, 300), (0, 1)]
        dtype, tolerance = torch.bfloat16, 1e-2
    case = Case.random(work, 4, 2, 64, block, device, dtype=dtype)
    gate = fused(torch.randn(sum(case.lens), 4 * 64).to(dtype).to(device))[0] if gated else None
    where = (case.k, case.v, case.tables, case.contexts, cu(case.lens).to(device), case.lens, 0.125)
    contexts = tuple(c for c, _ in work)
    got = fast.paged_attention(case.q, *where, gate=gate, host_contexts=contexts, library=name)
    expected = reference.paged_attention(case.q, *where, gate=gate, host_contexts=contexts)
    assert relative_error(got, expected) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("work", [(4096, 4096), (16384, 4096), (20000, 7001)], ids=str)
@pytest.mark.parametrize("name", Library)
def test_wide_heads_on_a_gpu(name: Library, work: tuple[int, int]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
    if reason := library.why_not(name, torch.device("cuda"), 256):
        assert name is not Library.CUDNN, reason
        pytest.skip(f"{name}: {reason}")
    case = Case.random([work], 16, 4, 256, 64, "cuda", dtype=torch.bfloat16)
    where = (case.k, case.v, case.tables, case.contexts, cu(case.lens).cuda(), case.lens, 256**-0.5)
    got = fast.paged_attention(case.q, *where, host_contexts=(work[0],), library=name)
    assert relative_error(got, fast.paged_attention(case.q, *where)) < 1e-2
