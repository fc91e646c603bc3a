from dataclasses import dataclass

import pytest
import torch

from tests.kernels.varlen import SPLITS, bools, cu, nan_pool, rows
from twinflow.kernels.mamba2_ssd.reference import mamba2_ssd

H, G, P, N = 6, 2, 24, 16


@dataclass
class Heads:
    """Per-head parameters (H,)."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor

    @classmethod
    def random(cls) -> "Heads":
        return cls(torch.rand(H).mul(15).add(1).log(), torch.empty(H).uniform_(-4, 1), torch.randn(H))


@dataclass
class Inputs:
    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    dt: torch.Tensor
    heads: Heads

    @classmethod
    def random(cls, tokens: int, seed: int = 0, groups: int = G) -> "Inputs":
        torch.manual_seed(seed)
        b, c = torch.randn(tokens, groups, N), torch.randn(tokens, groups, N)
        return cls(torch.randn(tokens, H, P), b, c, torch.randn(tokens, H), Heads.random())

    def split(self, lens: list[int]) -> list["Inputs"]:
        parts = [t.split(lens) for t in (self.x, self.b, self.c, self.dt)]
        return [Inputs(*p, self.heads) for p in zip(*parts, strict=True)]

    def run(self, state: torch.Tensor, lens: list[int], at: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        h = self.heads
        return mamba2_ssd(
            self.x, self.b, self.c, self.dt, h.a_log, h.dt_bias, h.skip, state, at, fresh, cu(lens), tuple(lens)
        )  # fmt: skip


def naive(inputs: Inputs, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token in fp64 with loops over heads; s (H, P, N)."""
    s, out = s.double().clone(), torch.zeros(inputs.x.shape, dtype=torch.float64)
    heads, groups = inputs.heads, inputs.b.shape[1]
    for t in range(inputs.x.shape[0]):
        for h in range(H):
            x, b, c = inputs.x[t, h].double(), *(v[t, h // (H // groups)].double() for v in (inputs.b, inputs.c))
            step = (1 + (inputs.dt[t, h].double() + heads.dt_bias[h].double()).exp()).log()
            s[h] *= (-step * heads.a_log[h].double().exp()).exp()
            s[h] += torch.outer(step * x, b)
            out[t, h] = s[h] @ c + heads.skip[h].double() * x
    return out.float(), s.float()


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 129, 200])
@pytest.mark.parametrize("fresh", [True, False], ids=("fresh", "resumed"))
def test_equals_a_loop_over_tokens(tokens: int, fresh: bool) -> None:
    inputs, state = Inputs.random(tokens), nan_pool(3, H, P, N)
    start = torch.zeros(H, P, N) if fresh else torch.randn(H, P, N)
    if not fresh:
        state[1] = start
    out = inputs.run(state, [tokens], rows(1), bools(fresh))
    expected, last = naive(inputs, start)
    assert_near(out, expected)
    assert_near(state[1], last)
    assert state[[0, 2]].isnan().all()


@pytest.mark.parametrize("groups", [1, 2, 3, H])
@pytest.mark.parametrize("tokens", [1, 70])
def test_heads_read_their_group(groups: int, tokens: int) -> None:
    inputs, state = Inputs.random(tokens, groups=groups), torch.randn(1, H, P, N)
    expected, last = naive(inputs, state[0])
    assert_near(inputs.run(state, [tokens], rows(0), bools(False)), expected)
    assert_near(state[0], last)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_gives_the_same(split: tuple[int, ...]) -> None:
    inputs, whole, parts = Inputs.random(129), nan_pool(1, H, P, N), nan_pool(2, H, P, N)
    expected = inputs.run(whole, [129], rows(0), bools(True))
    pieces = inputs.split(list(split))
    got = [p.run(parts, [len(p.x)], rows(1), bools(i == 0)) for i, p in enumerate(pieces)]
    assert_near(torch.cat(got), expected)
    assert_near(parts[1], whole[0])


def test_a_mixed_batch_equals_its_sequences_alone() -> None:
    lens, at, fresh = [1, 65, 1, 3, 1, 0], rows(5, 0, 3, 7, 2, 6), bools(False, True, True, False, False, False)
    inputs, state = Inputs.random(sum(lens)), torch.randn(8, H, P, N)
    alone = state.clone()
    got = inputs.run(state, lens, at, fresh)
    pieces = inputs.split(lens)[:5]
    each = [p.run(alone, [len(p.x)], at[i : i + 1], fresh[i : i + 1]) for i, p in enumerate(pieces)]
    assert_near(got, torch.cat(each))
    assert_near(state, alone)
    assert state[[1, 4, 6]].equal(alone[[1, 4, 6]])


@pytest.mark.parametrize("lens", [[1, 1, 1], [4, 1, 5], [1, 70, 1]], ids=str)
def test_padding_rows_read_and_write_nothing(lens: list[int]) -> None:
    inputs, state = Inputs.random(sum(lens)), nan_pool(2, H, P, N)
    assert inputs.run(state, lens, rows(-1, 1, -1), bools(False, True, False)).isfinite().all()
    assert state[0].isnan().all()
    assert state[1].isfinite().all()


def test_hard_decay_neither_overflows_nor_gives_nan() -> None:
    inputs, state = Inputs.random(130), nan_pool(1, H, P, N)
    inputs.dt[::3] = 60.0  # steps of 60 and decays down to exp(-960)
    out = inputs.run(state, [130], rows(0), bools(True))
    expected, last = naive(inputs, torch.zeros(H, P, N))
    assert_near(out, expected)
    assert_near(state[0], last)


@pytest.mark.parametrize("split", [(40,), (1,) * 40, (7, 33)], ids=("chunk", "tokens", "both"))
def test_small_steps_are_not_clamped(split: tuple[int, ...]) -> None:
    """Steps near 1e-4: raising them to 0.001, as some implementations do for chunks only, would change everything."""
    inputs, state = Inputs.random(40), nan_pool(1, H, P, N)
    inputs.heads.dt_bias.fill_(-9.0)
    expected, last = naive(inputs, torch.zeros(H, P, N))
    pieces = inputs.split(list(split))
    got = [p.run(state, [len(p.x)], rows(0), bools(i == 0)) for i, p in enumerate(pieces)]
    assert_near(torch.cat(got), expected)
    assert_near(state[0], last)


def test_a_bf16_state_is_rounded_only_when_stored() -> None:
    inputs, exact, rounded = Inputs.random(65), nan_pool(1, H, P, N), nan_pool(1, H, P, N, dtype=torch.bfloat16)
    assert inputs.run(rounded, [65], rows(0), bools(True)).equal(inputs.run(exact, [65], rows(0), bools(True)))
    assert rounded[0].equal(exact[0].bfloat16())


@pytest.mark.parametrize("tokens", [1, 9])
def test_bf16_inputs_are_computed_in_fp32(tokens: int) -> None:
    inputs, state = Inputs.random(tokens), nan_pool(1, H, P, N)
    inputs.x, inputs.b, inputs.c, inputs.dt = (t.bfloat16() for t in (inputs.x, inputs.b, inputs.c, inputs.dt))
    out = inputs.run(state, [tokens], rows(0), bools(True))
    assert out.dtype == torch.bfloat16
    exact = Inputs(inputs.x.float(), inputs.b.float(), inputs.c.float(), inputs.dt.float(), inputs.heads)
    expected, last = naive(exact, torch.zeros(H, P, N))
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
    assert_near(state[0], last)
