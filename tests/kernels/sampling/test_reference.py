"""The oracle against plain definitions, and what happens exactly at ties, thresholds and in broken rows."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.kernels.sampling.cases import BITS, FREE, GREEDY, Row, plain_adjust, plain_draw, random_row, tables_of
from twinflow.contracts.requests import SamplingParams
from twinflow.kernels.sampling.reference import sample_tokens, token_logprobs
from twinflow.kernels.sampling.tables import BROKEN, COUNT_MASK, NOTHING_LEFT, OK, PROMPT_MARK

INF = float("inf")
EVEN = [i * BITS // 1000 for i in range(1000)]


def sample(logits: torch.Tensor, *rows: Row) -> list[tuple[int, int]]:
    """(token, outcome) per row; one row of logits serves all."""
    tables, steps, needs = tables_of(rows, logits.shape[-1])
    out = sample_tokens(logits.expand(len(rows), -1), tables, steps, needs)
    return [(token, outcome) for token, outcome in out.T.tolist()]


def drawn(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    """Tokens at 1,000 evenly spaced random numbers."""
    found = sample(logits, *(Row(params, bits) for bits in EVEN))
    assert {outcome for _, outcome in found} == {OK}
    return [token for token, _ in found]


def log(*probs: float) -> torch.Tensor:
    return torch.tensor(probs).log()


options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.2, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 100]),
        "top_p": st.sampled_from([1.0, 0.95, 0.6, 0.1, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.5, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 0.4, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3]),
        "min_tokens": st.integers(0, 3),
    }
)


@settings(max_examples=400, deadline=None)
@given(st.data(), options)
def test_every_option_against_sorting(data: st.DataObject, chosen: dict[str, float]) -> None:
    vocab = data.draw(st.integers(2, 30))
    ids = st.integers(0, vocab - 1)
    logit = st.one_of(st.integers(-3, 3).map(float), st.floats(-20, 20, width=32), st.just(-INF))
    logits = data.draw(st.lists(logit, min_size=vocab, max_size=vocab))
    bias = data.draw(st.lists(st.tuples(ids, st.floats(-5, 5, width=32)), max_size=4))
    ending = data.draw(st.lists(ids, max_size=2))
    params = replace(FREE, **chosen, logit_bias=tuple(bias), eos_token_ids=tuple(ending))  # type: ignore[arg-type]
    prompt, generated = (tuple(data.draw(st.lists(ids, max_size=6))) for _ in range(2))
    row = Row(params, data.draw(st.integers(0, BITS - 1)), data.draw(st.integers(0, 4)), prompt, generated)
    adjusted = plain_adjust(logits, row)
    (token, outcome), *_ = sample(torch.tensor(logits), row)
    if max(adjusted) == -INF:
        assert (token, outcome) == (0, NOTHING_LEFT)
        return
    expected, margin = plain_draw(adjusted, row)
    assume(margin > 1e-9)
    assert (token, outcome) == (expected, OK)


def test_a_batch_of_different_rows_at_once() -> None:
    choose = random.Random(1)
    rows = [random_row(300, choose) for _ in range(60)]
    logits = torch.randn(60, 300, generator=torch.Generator().manual_seed(1)) * 3
    tables, steps, needs = tables_of(rows, 300)
    tokens = sample_tokens(logits, tables, steps, needs)[0].tolist()
    for row, mine, token in zip(rows, logits.tolist(), tokens, strict=True):
        expected, margin = plain_draw(plain_adjust(mine, row), row)
        assert token == expected or margin < 1e-9


def test_frequencies_follow_the_distribution_and_temperature_sharpens() -> None:
    tokens = drawn(log(0.1, 0.6, 0.3), FREE)
    assert [tokens.count(i) for i in range(3)] == pytest.approx([100, 600, 300], abs=1)
    tokens = drawn(log(0.1, 0.6, 0.3), replace(FREE, temperature=0.5))
    assert [tokens.count(i) for i in range(3)] == pytest.approx([1000 * p / 0.46 for p in (0.01, 0.36, 0.09)], abs=1)


def test_random_numbers_walk_through_the_vocabulary_in_its_order() -> None:
    assert drawn(log(0.1, 0.6, 0.3), FREE) == sorted(drawn(log(0.1, 0.6, 0.3), FREE))
    assert sample(log(0.1, 0.6, 0.3), Row(FREE, 0), Row(FREE, BITS - 1)) == [(0, OK), (2, OK)]


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
        ({"top_k": 2, "top_p": 0.62}, {1}),  # 0.5 of 0.8 is enough
        ({"top_k": 2, "top_p": 0.63}, {1, 2}),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.3}, {1, 2}),
    ],
    ids=str,
)
def test_filters_keep_what_they_say(change: dict[str, float], allowed: set[int]) -> None:
    assert set(drawn(log(0.12, 0.5, 0.3, 0.08), replace(FREE, **change))) == allowed  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.5}, {0, 1}),
        ({"top_p": 0.51}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, {0, 1, 2, 3}),
    ],
    ids=str,
)
def test_of_equal_logits_the_lowest_ids_stay(change: dict[str, float], allowed: set[int]) -> None:
    assert set(drawn(torch.full((4,), 2.5), replace(FREE, **change))) == allowed  # type: ignore[arg-type]


def test_greedy_takes_the_lowest_of_equal_ids_and_zero_has_no_sign() -> None:
    assert sample(torch.tensor([1.0, 3.0, 3.0, 3.0]), Row(GREEDY)) == [(1, OK)]
    assert sample(torch.tensor([-1.0, -0.0, 0.0]), Row(GREEDY)) == [(1, OK)]
    assert set(drawn(torch.tensor([-1.0, -0.0, 0.0]), replace(FREE, top_k=1))) == {1}


def test_greedy_ignores_the_random_number() -> None:
    assert {t for t, _ in sample(log(0.2, 0.5, 0.3), *(Row(GREEDY, b) for b in EVEN[::50]))} == {1}


@pytest.mark.parametrize(
    "params", [GREEDY, FREE, replace(FREE, top_k=2, top_p=0.5, min_p=0.1)], ids=["greedy", "free", "all"]
)
def test_a_broken_row_fails_alone(params: SamplingParams) -> None:
    nan = float("nan")
    logits = torch.tensor(
        [[1.0, nan, 0.0], [9.0, 0.0, 0.0], [0.0, INF, 0.0], [-INF] * 3, [-INF, nan, -INF], [-INF, 5.0, -INF]]
    )
    tables, steps, needs = tables_of([Row(params)] * 6, 3)
    out = sample_tokens(logits, tables, steps, needs)
    assert out.tolist() == [[0, 0, 0, 0, 0, 1], [BROKEN, OK, BROKEN, NOTHING_LEFT, BROKEN, OK]]


def test_banning_everything_leaves_nothing() -> None:
    params = replace(FREE, min_tokens=1, stop_token_ids=(0, 1, 2))
    assert sample(torch.zeros(3), Row(params), Row(params, position=1)) == [(0, NOTHING_LEFT), (0, OK)]


def test_drawn_tokens_are_counted_and_the_count_saturates() -> None:
    params = replace(GREEDY, frequency_penalty=1.0)
    tables, steps, needs = tables_of([Row(params, generated=(1, 1)), Row(params)], 3)
    logits = torch.tensor([[0.0, 5.0, 4.5], [0.0, 0.0, float("nan")]])
    tokens = [sample_tokens(logits, tables, steps, needs)[0, 0].item() for _ in range(4)]
    assert tokens == [2, 2, 1, 2]  # 3.0 4.5 · 3.0 3.5 · 3.0 2.5 · 2.0 2.5
    mine, broken = tables.histories[tables.records[steps[0], 8]]
    assert mine.tolist() == [0, 3, 3] and broken.tolist() == [0, 0, 0]
    for full in (COUNT_MASK, COUNT_MASK | PROMPT_MARK):
        tables.histories[:] = full
        sample_tokens(logits, tables, steps, needs)
        assert (tables.histories == full).all()


def test_logprobs_are_of_the_raw_logits_the_best_first() -> None:
    logits = torch.stack([log(0.1, 0.6, 0.3) + 7.0, torch.tensor([1.0, 1.0, 1.0]), torch.tensor([-INF, 0.0, -INF])])
    values, ids = token_logprobs(logits, torch.tensor([2, 0, 1]), torch.tensor([2, 1, 1]), 2)
    assert ids.tolist() == [[1, 0], [1, 2], [0, 1]]
    third = -torch.tensor(3.0).log().item()
    expected = [[0.0, 0.0, -INF], [*log(0.3, 0.6, 0.3).tolist()], [third] * 3]
    torch.testing.assert_close(values, torch.tensor(expected), atol=1e-5, rtol=0)
    values, ids = token_logprobs(logits, torch.tensor([0]), torch.tensor([0, 0, 0]), 0)
    assert values.shape == (1, 1) and ids.shape == (1, 0)
