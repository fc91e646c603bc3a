"""Sampling against plain definitions, and its one promise: a function of (seed, sample index, position) alone."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from twinflow.contracts.requests import SamplingParams
from twinflow.engine.sampling import adjust, draw, token_logprobs, uniform

GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0)
FREE = SamplingParams(max_tokens=8, seed=0, temperature=1.0)


def logits(*probs: float) -> torch.Tensor:
    return torch.tensor(probs).log()


def draws(row: torch.Tensor, params: SamplingParams, n: int = 4000) -> Counter[int]:
    return Counter(draw(row, replace(params, seed=i), 0) for i in range(n))


def test_uniform_is_uniform_and_depends_on_each_argument() -> None:
    values = torch.tensor([uniform(s, 0, p) for s in range(100) for p in range(100)])
    assert float(values.min()) >= 0.0 and float(values.max()) < 1.0
    counts = torch.histc(values, 10, 0.0, 1.0)
    assert float(counts.min()) > 850 and float(counts.max()) < 1150
    assert len({uniform(1, 0, 0), uniform(2, 0, 0), uniform(1, 1, 0), uniform(1, 0, 1)}) == 4
    assert uniform(2**64 + 5, 0, 0) == uniform(5, 0, 0)


def test_greedy_takes_the_best_and_ignores_seed() -> None:
    row = logits(0.2, 0.5, 0.3)
    assert {draw(row, replace(GREEDY, seed=s), s) for s in range(20)} == {1}


def test_frequencies_follow_the_distribution() -> None:
    counts = draws(logits(0.1, 0.6, 0.3), FREE)
    assert [counts[i] / 4000 for i in range(3)] == pytest.approx([0.1, 0.6, 0.3], abs=0.03)


def test_temperature_sharpens() -> None:
    counts = draws(logits(0.1, 0.6, 0.3), replace(FREE, temperature=0.5))
    squares = [0.01, 0.36, 0.09]
    assert [counts[i] / 4000 for i in range(3)] == pytest.approx([s / sum(squares) for s in squares], abs=0.03)


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.6}, {1, 2}),
        ({"top_p": 0.49}, {1}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.5}, {1, 2}),
        ({"min_p": 1.0}, {1}),
    ],
    ids=str,
)
def test_filters_keep_what_they_say(change: dict[str, float], allowed: set[int]) -> None:
    assert set(draws(logits(0.12, 0.5, 0.3, 0.08), replace(FREE, **change), 2000)) == allowed  # type: ignore[arg-type]


def test_repetition_penalty_as_in_hugging_face() -> None:
    row = torch.tensor([2.0, -2.0, 1.0, 4.0])
    out = adjust(row, replace(GREEDY, repetition_penalty=2.0), [0, 1], [3])
    assert out.tolist() == [1.0, -4.0, 1.0, 2.0]
    assert row.tolist() == [2.0, -2.0, 1.0, 4.0]


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    params = replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.25)
    assert adjust(torch.zeros(4), params, [0, 0], [2, 2, 3]).tolist() == [0.0, 0.0, -1.0, -0.75]


def test_bias_can_force_and_ban() -> None:
    row = torch.tensor([3.0, 2.0, 1.0])
    assert draw(adjust(row, replace(GREEDY, logit_bias=((2, 100.0),)), [], []), GREEDY, 0) == 2
    assert draw(adjust(row, replace(GREEDY, logit_bias=((0, -100.0),)), [], []), GREEDY, 0) == 1


def test_min_tokens_bans_every_ending_until_then() -> None:
    params = replace(GREEDY, min_tokens=2, eos_token_ids=(0,), stop_token_ids=(1,))
    row = torch.tensor([3.0, 2.0, 1.0])
    assert int(adjust(row, params, [], [5]).argmax()) == 2
    assert int(adjust(row, params, [], [5, 5]).argmax()) == 0
    assert int(adjust(row, replace(params, ignore_eos=True), [], [5]).argmax()) == 0


def test_logprobs_are_of_the_raw_logits() -> None:
    row = logits(0.1, 0.6, 0.3) + 7.0
    found = token_logprobs(row, 2, 2)
    assert found.logprob == pytest.approx(torch.tensor(0.3).log().item(), abs=1e-5)
    assert [i for i, _ in found.top] == [1, 2]
    assert token_logprobs(row, 0, 0).top == ()
