import random
from dataclasses import replace

import pytest
import torch

from tests.kernels.sampling.cases import BITS, FREE, GREEDY, Row, on, random_row, tables_of
from twinflow.contracts.requests import SamplingParams
from twinflow.kernels.sampling import reference
from twinflow.kernels.sampling.tables import BROKEN, NOTHING_LEFT, OK

triton = pytest.importorskip("triton", reason="triton is not installed")
from twinflow.kernels.sampling import threshold  # noqa: E402
from twinflow.kernels.sampling import triton as fast  # noqa: E402


def noise(n: int, vocab: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def both(logits: torch.Tensor, rows: list[Row], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens and outcomes of the kernel, of the reference); the histories afterwards are compared here."""
    tables, steps, needs = tables_of(rows, logits.shape[1])
    moved = on(device, tables)
    got = fast.sample_tokens(logits.to(device), moved, steps.to(device), needs).cpu()
    expected = reference.sample_tokens(logits, tables, steps, needs)
    assert moved.histories.cpu().equal(tables.histories)
    return got, expected


@pytest.mark.parametrize(
    ("vocab", "spread", "dtype"),
    [(2, 1.0, torch.float32), (17, 3.0, torch.bfloat16), (1000, 1.0, torch.float16), (2999, 4.0, torch.float32)],
    ids=str,
)
def test_every_option_equals_the_reference(vocab: int, spread: float, dtype: torch.dtype, device: str) -> None:
    choose = random.Random(vocab)
    rows = [random_row(vocab, choose) for _ in range(5)]
    got, expected = both(noise(5, vocab, spread).to(dtype), rows, device)
    assert got.equal(expected)


@pytest.mark.parametrize("spread", [0.0, 0.5], ids=["equal logits", "few distinct logits"])
def test_ties(spread: float, device: str) -> None:
    filters = [{"top_k": 7}, {"top_p": 0.5}, {"top_k": 900, "top_p": 0.3}, {"top_k": 30, "top_p": 0.9, "min_p": 0.9}]
    rows = [Row(replace(FREE, **f), BITS // 7 * i) for i, f in enumerate(filters, 3)]  # type: ignore[arg-type]
    got, expected = both(noise(4, 1201, spread).round(), rows, device)
    assert got.equal(expected)


def test_keys_that_do_not_fit_are_read_from_the_row(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "_ROOM", 16)
    filters = [{"top_k": 300}, {"top_p": 0.8}, {"top_k": 700, "top_p": 0.6}]
    rows = [Row(replace(FREE, **f), BITS // 2) for f in filters]  # type: ignore[arg-type]
    got, expected = both(noise(3, 1100, 1.0), rows, device)
    assert got.equal(expected)


@pytest.mark.parametrize("change", [{}, {"temperature": 0.0}, {"top_p": 0.9}], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(
    change: dict[str, float], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row alone is split over many programs, one of many over few."""
    logits = noise(3, 4500, 2.0)
    rows = [Row(replace(FREE, **change), i * (BITS // 3)) for i in (1, 2, 2)]  # type: ignore[arg-type]
    rows[1] = Row(replace(GREEDY, frequency_penalty=1.0, logit_bias=((4, 9.0),)))
    alone = [both(logits[i : i + 1], [rows[i]], device) for i in (0, 2)]
    for module, name in ((fast, "_BEST_PROGRAMS"), (threshold, "_PIVOT_PROGRAMS"), (threshold, "_GATHER_PROGRAMS")):
        monkeypatch.setattr(module, name, 0)
    together, _ = both(logits, rows, device)
    for i, (got, expected) in zip((0, 2), alone, strict=True):
        assert got[:, 0].equal(together[:, i]) and got.equal(expected)


@pytest.mark.parametrize("params", [GREEDY, FREE, replace(FREE, top_k=2, top_p=0.5)], ids=["greedy", "free", "filters"])
def test_a_broken_row_fails_alone(params: SamplingParams, device: str) -> None:
    logits = noise(5, 300, 1.0)
    logits[0, 299], logits[1, 0], logits[2, :] = float("nan"), float("inf"), -float("inf")
    logits[3, 1:] = -float("inf")
    got, expected = both(logits, [Row(params, BITS // 2)] * 5, device)
    assert got.equal(expected) and got[1].tolist() == [BROKEN, BROKEN, NOTHING_LEFT, OK, OK]


@pytest.mark.parametrize(
    "params",
    [GREEDY, FREE, replace(FREE, top_k=2, top_p=0.5), replace(FREE, top_k=50), replace(FREE, top_p=0.9, min_p=0.1)],
    ids=["greedy", "free", "filters", "top-k", "top-p"],
)
@pytest.mark.parametrize("left", [1, 2, 40])
def test_hardly_anything_is_allowed(params: SamplingParams, left: int, device: str) -> None:
    """What a grammar leaves of a vocabulary: the rest is -inf, far more than any filter would cut."""
    logits = noise(2, 1500, 3.0)
    may = torch.randperm(1500, generator=torch.Generator().manual_seed(left))[:left]
    kept = torch.full_like(logits, -float("inf"))
    kept[:, may] = logits[:, may]
    got, expected = both(kept, [Row(params, BITS // 3 * i) for i in (1, 2)], device)
    assert got.equal(expected) and got[1].tolist() == [OK] * 2 and set(got[0].tolist()) <= set(may.tolist())


def test_zero_has_no_sign(device: str) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]] * 2)
    got, _ = both(logits, [Row(GREEDY), Row(replace(FREE, top_k=1))], device)
    assert got[0].tolist() == [1, 1]


def test_rows_of_a_wider_tensor_and_none_at_all(device: str) -> None:
    wide = noise(3, 400, 3.0)
    rows = [Row(replace(FREE, min_p=0.1), BITS // 4 * i) for i in (1, 2, 3)]
    tables, steps, needs = tables_of(rows, 310)
    moved = on(device, tables)
    got = fast.sample_tokens(wide.to(device)[:, 50:360], moved, steps.to(device), needs).cpu()
    assert got.equal(reference.sample_tokens(wide[:, 50:360], tables, steps, needs))
    none = fast.sample_tokens(wide[:0, :310].to(device), moved, steps[:, :0].to(device), needs)
    assert none.shape == (2, 0)


@pytest.mark.parametrize("top", [0, 1, 20], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs(top: int, dtype: torch.dtype, device: str) -> None:
    logits = noise(5, 4500, 3.0).to(dtype)  # bf16: many equal ones
    logits[3] = 0.0
    logits[4, 7:] = -float("inf")
    picks, tokens = torch.tensor([4, 0, 3]), torch.tensor([4499, 1, 2, 3, 5])
    expected_values, expected_ids = reference.token_logprobs(logits, picks, tokens, top)
    values, ids = fast.token_logprobs(logits.to(device), picks.to(device), tokens.to(device), top)
    assert ids.cpu().equal(expected_ids)
    torch.testing.assert_close(values.cpu(), expected_values, atol=1e-5, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0, 8.0], ids=str)
def test_a_real_vocabulary(spread: float) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
    choose = random.Random(int(spread * 10))
    rows = [random_row(151_936, choose) for _ in range(64)]
    got, expected = both(noise(64, 151_936, spread), rows, "cuda")
    assert int((got != expected).any(0).sum()) <= 1  # fp32 against fp64 exponentials: equal but in vanishing cases
