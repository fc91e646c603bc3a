from dataclasses import dataclass

import pytest
import torch

from tests.kernels.varlen import SPLITS, bools, nan_pool, rows
from twinflow.kernels.gated_delta_rule.reference import delta_gates, gated_delta_rule

HK, HV, K, V = 2, 6, 16, 24


@dataclass
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def random(cls, tokens: int, seed: int = 0) -> "Inputs":
        torch.manual_seed(seed)
        a, b = torch.randn(tokens, HV), torch.randn(tokens, HV)
        g, beta = delta_gates(a, b, torch.rand(HV).mul(15).add(1).log(), torch.empty(HV).uniform_(-4, 1))
        return cls(torch.randn(tokens, HK, K), torch.randn(tokens, HK, K), torch.randn(tokens, HV, V), g, beta)

    def split(self, lens: list[int]) -> list["Inputs"]:
        parts = [t.split(lens) for t in (self.q, self.k, self.v, self.g, self.beta)]
        return [Inputs(*p) for p in zip(*parts, strict=True)]

    def run(self, state: torch.Tensor, lens: list[int], at: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        return gated_delta_rule(self.q, self.k, self.v, self.g, self.beta, state, at, fresh, tuple(lens))


def naive(x: Inputs, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token in fp64 with loops over heads; s (HV, V, K)."""
    s, out = s.double().clone(), torch.zeros(x.v.shape, dtype=torch.float64)
    for t in range(x.v.shape[0]):
        for h in range(HV):
            q, k = x.q[t, h // (HV // HK)].double(), x.k[t, h // (HV // HK)].double()
            q, k = q / (q.dot(q) + 1e-6).sqrt() / K**0.5, k / (k.dot(k) + 1e-6).sqrt()
            s[h] *= x.g[t, h].double().exp()
            s[h] += torch.outer((x.v[t, h].double() - s[h] @ k) * x.beta[t, h].double(), k)
            out[t, h] = s[h] @ q
    return out.float(), s.float()


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_gates() -> None:
    a, b, a_log, dt_bias = torch.randn(5, HV), torch.randn(5, HV), torch.randn(HV), torch.randn(HV)
    g, beta = delta_gates(a.bfloat16(), b, a_log, dt_bias)
    assert g.dtype == beta.dtype == torch.float32
    g, beta = delta_gates(a, b, a_log, dt_bias)
    torch.testing.assert_close(g, -a_log.exp() * (1 + (a + dt_bias).exp()).log(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(beta, 1 / (1 + (-b).exp()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 129, 200])
@pytest.mark.parametrize("fresh", [True, False], ids=("fresh", "resumed"))
def test_equals_a_loop_over_tokens(tokens: int, fresh: bool) -> None:
    x, state = Inputs.random(tokens), nan_pool(3, HV, V, K)
    start = torch.zeros(HV, V, K) if fresh else torch.randn(HV, V, K)
    if not fresh:
        state[1] = start
    out = x.run(state, [tokens], rows(1), bools(fresh))
    expected, last = naive(x, start)
    assert_near(out, expected)
    assert_near(state[1], last)
    assert state[[0, 2]].isnan().all()


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_gives_the_same(split: tuple[int, ...]) -> None:
    x, whole, parts = Inputs.random(129), nan_pool(1, HV, V, K), nan_pool(2, HV, V, K)
    expected = x.run(whole, [129], rows(0), bools(True))
    pieces = x.split(list(split))
    got = [p.run(parts, [len(p.v)], rows(1), bools(i == 0)) for i, p in enumerate(pieces)]
    assert_near(torch.cat(got), expected)
    assert_near(parts[1], whole[0])


def test_a_mixed_batch_equals_its_sequences_alone() -> None:
    lens, at, fresh = [1, 65, 1, 3, 1], rows(5, 0, 3, 7, 2), bools(False, True, True, False, False)
    x, state = Inputs.random(sum(lens)), torch.randn(8, HV, V, K)
    alone = state.clone()
    got = x.run(state, lens, at, fresh)
    pieces = x.split(lens)
    each = [p.run(alone, [len(p.v)], at[i : i + 1], fresh[i : i + 1]) for i, p in enumerate(pieces)]
    assert_near(got, torch.cat(each))
    assert_near(state, alone)
    assert state[[1, 4, 6]].equal(alone[[1, 4, 6]])


@pytest.mark.parametrize("lens", [[1, 1, 1], [4, 1, 5], [1, 70, 1]], ids=str)
def test_padding_rows_read_and_write_nothing(lens: list[int]) -> None:
    x, state = Inputs.random(sum(lens)), nan_pool(2, HV, V, K)
    assert x.run(state, lens, rows(-1, 1, -1), bools(False, True, False)).isfinite().all()
    assert state[0].isnan().all()
    assert state[1].isfinite().all()


def test_hard_decay_neither_overflows_nor_gives_nan() -> None:
    x, state = Inputs.random(130), nan_pool(1, HV, V, K)
    x.g[::3] = -500.0
    out = x.run(state, [130], rows(0), bools(True))
    expected, last = naive(x, torch.zeros(HV, V, K))
    assert_near(out, expected)
    assert_near(state[0], last)


def test_a_bf16_state_is_rounded_only_when_stored() -> None:
    x, exact, rounded = Inputs.random(65), nan_pool(1, HV, V, K), nan_pool(1, HV, V, K, dtype=torch.bfloat16)
    assert x.run(rounded, [65], rows(0), bools(True)).equal(x.run(exact, [65], rows(0), bools(True)))
    assert rounded[0].equal(exact[0].bfloat16())
