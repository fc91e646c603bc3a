from collections.abc import Sequence

import pytest
import torch

from tests.kernels.varlen import SPLITS, bools, cu, nan_pool, rows
from twinflow.kernels.causal_conv1d.reference import causal_conv1d

C, W = 6, 4


def conv(
    x: torch.Tensor, w: torch.Tensor, state: torch.Tensor, lens: Sequence[int], at: torch.Tensor, fresh: torch.Tensor
) -> torch.Tensor:
    return causal_conv1d(x, w, None, state, at, fresh, cu(lens), tuple(lens))


def naive(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token from the zero state, in fp64: y (T, C), last inputs (C, W-1)."""
    window = torch.zeros(w.shape, dtype=torch.float64)
    out = []
    for token in x.double():
        window = torch.cat([window[:, 1:], token[:, None]], 1)
        y = (window * w.double()).sum(1) + (0 if bias is None else bias.double())
        out.append(y / (1 + (-y).exp()))
    return torch.stack(out).float(), window[:, 1:].float()


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 63, 500])
def test_equals_a_loop_over_tokens(tokens: int, width: int) -> None:
    torch.manual_seed(0)
    x, w, bias, state = torch.randn(tokens, C), torch.randn(C, width), torch.randn(C), nan_pool(3, C, width - 1)
    y = causal_conv1d(x, w, bias, state, rows(1), bools(True), cu([tokens]), (tokens,))
    expected, last = naive(x, w, bias)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert state[1].equal(last)
    assert state[[0, 2]].isnan().all()


def test_without_activation() -> None:
    x, w = torch.randn(5, C), torch.randn(C, W)
    linear = causal_conv1d(x, w, None, nan_pool(1, C, W - 1), rows(0), bools(True), cu([5]), (5,), False)
    torch.testing.assert_close(linear / (1 + (-linear).exp()), naive(x, w)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_gives_the_same(split: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(129, C), torch.randn(C, W)
    whole, parts = nan_pool(1, C, W - 1), nan_pool(2, C, W - 1)
    expected = conv(x, w, whole, [129], rows(0), bools(True))
    got = [conv(p, w, parts, [len(p)], rows(1), bools(i == 0)) for i, p in enumerate(x.split(list(split)))]
    torch.testing.assert_close(torch.cat(got), expected, rtol=1e-6, atol=1e-6)
    assert parts[1].equal(whole[0])


def test_a_mixed_batch_equals_its_sequences_alone() -> None:
    torch.manual_seed(0)
    lens, w = [1, 65, 2, 1, 3], torch.randn(C, W)
    state = torch.randn(8, C, W - 1)
    at, fresh = rows(5, 0, 3, 7, 2), bools(False, True, False, True, False)
    alone = state.clone()
    pieces = torch.randn(sum(lens), C).split(lens)
    got = conv(torch.cat(pieces), w, state, lens, at, fresh)
    each = [conv(p, w, alone, [len(p)], at[i : i + 1], fresh[i : i + 1]) for i, p in enumerate(pieces)]
    torch.testing.assert_close(got, torch.cat(each), rtol=1e-6, atol=1e-6)
    assert state.equal(alone)


@pytest.mark.parametrize("lens", [[1, 1, 1], [4, 1, 5]], ids=str)
def test_padding_rows_read_and_write_nothing(lens: list[int]) -> None:
    torch.manual_seed(0)
    state, w, x = nan_pool(2, C, W - 1), torch.randn(C, W), torch.randn(sum(lens), C)
    y = conv(x, w, state, lens, rows(-1, 1, -1), bools(False, True, False))
    assert y.isfinite().all()
    assert state[0].isnan().all()
    assert state[1].isfinite().all()


def test_bf16_keeps_its_inputs_exactly() -> None:
    torch.manual_seed(0)
    x, w, state = torch.randn(9, C).bfloat16(), torch.randn(C, W), nan_pool(1, C, W - 1, dtype=torch.bfloat16)
    y = conv(x, w, state, [9], rows(0), bools(True))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), naive(x.float(), w)[0], rtol=1e-2, atol=1e-2)
    assert state[0].equal(x[-3:].t())
