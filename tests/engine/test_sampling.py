"""The sampler's rows: what a request asks for, what it has generated, and its one promise, a function of (seed, sample
index, position) alone. What is drawn from given logits: `tests/kernels/sampling`."""

import random
import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from twinflow.contracts.requests import SamplingParams, TokenLogprobs
from twinflow.engine.sampling import Drawn, RowMasks, Sampler
from twinflow.engine.sampling.params import hasher, uniform
from twinflow.kernels.select import reference_kernels, select_kernels

GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0)
FREE = SamplingParams(max_tokens=8, seed=0, temperature=1.0)


def packed(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def sampler(vocab: int, rows: int = 8) -> Sampler:
    return Sampler(vocab, rows, "cpu", reference_kernels())


def tokens(s: Sampler, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> list[int]:
    draw = s.launch(logits, rows, positions)
    drawn = draw.read()
    assert draw.tokens.tolist() == [d.token_id for d in drawn] and all(d.error is None for d in drawn)
    return [d.token_id for d in drawn]


def test_random_numbers_are_uniform_and_depend_on_each_argument() -> None:
    values = torch.tensor([uniform(hasher(s, 0), p) for s in range(100) for p in range(100)])
    assert float(values.min()) >= 0.0 and float(values.max()) < 1.0
    counts = torch.histc(values, 10, 0.0, 1.0)
    assert float(counts.min()) > 850 and float(counts.max()) < 1150
    assert len({uniform(hasher(s, i), p) for s, i, p in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]}) == 4
    assert uniform(hasher(2**64 + 5, 0), 0) == uniform(hasher(5, 0), 0)


def test_a_random_number_stays_what_it_is() -> None:
    """Workers of different releases serve one request: this value is part of the protocol."""
    assert uniform(hasher(1234, 1), 7) == 0.5285968184477166


def test_frequencies_follow_the_distribution() -> None:
    s = sampler(3, 1)
    s.start(0, FREE, b"", [])
    found = [tokens(s, torch.tensor([[0.1, 0.6, 0.3]]).log(), [0], [p])[0] for p in range(3000)]
    assert [found.count(i) / 3000 for i in range(3)] == pytest.approx([0.1, 0.6, 0.3], abs=0.03)


def test_a_token_depends_on_seed_index_and_position_not_on_row_or_batch() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    s = sampler(50)
    variants = [FREE, replace(FREE, seed=1), replace(FREE, sample_index=1), replace(FREE, top_p=0.8), GREEDY]
    for row, params in zip([5, 0, 3, 1, 7], variants, strict=True):
        s.start(row, params, b"", [])
    together = [tokens(s, logits.expand(5, -1), [5, 0, 3, 1, 7], [p] * 5) for p in range(30)]
    assert together == [tokens(s, logits.expand(5, -1), [7, 1, 3, 0, 5], [p] * 5)[::-1] for p in range(30)]
    columns = list(zip(*together, strict=True))
    assert len(set(columns[:3])) == 3 and len(set(columns[0])) > 10 and len(set(columns[4])) == 1
    for params, column in zip(variants, columns, strict=True):
        other = sampler(50, 1)
        other.start(0, params, b"", [])
        assert [tokens(other, logits, [0], [p])[0] for p in range(30)] == list(column)


def test_what_was_generated_is_the_same_whether_drawn_here_or_told() -> None:
    """A sequence that another worker, or a later start, goes on with sees the same penalties."""
    params = replace(FREE, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.2, seed=3)
    prompt = packed(1, 2, 2, 19)
    logits = torch.randn(12, 20, generator=torch.Generator().manual_seed(1)) * 2
    s = sampler(20)
    s.start(4, params, prompt, [])
    whole = [tokens(s, logits[i : i + 1], [4], [i])[0] for i in range(12)]
    assert max(map(whole.count, whole)) > 1
    for known in range(12):
        later = sampler(20)
        later.start(2, params, prompt, whole[:known])
        assert [tokens(later, logits[i : i + 1], [2], [i])[0] for i in range(known, 12)] == whole[known:]


def test_repetition_penalty_as_in_hugging_face() -> None:
    s = sampler(4)
    s.start(0, replace(GREEDY, repetition_penalty=2.0), packed(0, 1), [3])
    assert tokens(s, torch.tensor([[2.0, -2.0, 1.0, 4.0]]), [0], [1]) == [3]  # 1 -4 1 2
    assert tokens(s, torch.tensor([[2.1, -2.0, 1.0, 2.0]]), [0], [1]) == [0]  # 1.05 -4 1 1
    assert tokens(s, torch.tensor([[-1.0, -2.0, -1.9, -1.5]]), [0], [1]) == [2]  # -2 -4 -1.9 -3


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    s = sampler(4)
    s.start(0, replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.25), packed(0, 0), [2, 2, 3])
    assert tokens(s, torch.tensor([[0.0, 0.0, 0.99, 0.74]]), [0], [3]) == [0]
    assert tokens(s, torch.tensor([[0.0, 0.0, 1.01, 0.74]]), [0], [3]) == [2]


def test_bias_can_force_and_ban_and_adds_up() -> None:
    s = sampler(3)
    s.start(0, replace(GREEDY, logit_bias=((2, 100.0),)), b"", [])
    s.start(1, replace(GREEDY, logit_bias=((0, -100.0),)), b"", [])
    s.start(2, replace(GREEDY, logit_bias=((2, 1.5), (2, 1.0))), b"", [])
    assert tokens(s, torch.tensor([[3.0, 2.0, 1.0]]).expand(3, -1), [0, 1, 2], [0] * 3) == [2, 1, 2]


def test_min_tokens_bans_every_ending_until_then() -> None:
    s = sampler(3)
    params = replace(GREEDY, min_tokens=2, eos_token_ids=(0,), stop_token_ids=(1,), logit_bias=((1, 0.5),))
    s.start(0, params, b"", [])
    s.start(1, replace(params, ignore_eos=True), b"", [])
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 2)
    assert [tokens(s, logits, [0, 1], [p, p]) for p in range(3)] == [[2, 0], [2, 0], [0, 0]]


def test_a_row_is_free_again_after_its_sequence_has_left() -> None:
    s = sampler(4, 2)
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    s.start(0, replace(GREEDY, frequency_penalty=9.0, logit_bias=((1, -9.0),), logprobs=0), packed(2), [2])
    assert tokens(s, logits, [0], [1]) == [3]
    with pytest.raises(ValueError, match="row 0"):
        s.start(0, GREEDY, b"", [])
    s.stop(0)
    s.stop(0)
    with pytest.raises(KeyError):
        s.launch(logits, [0], [0])
    s.start(0, replace(GREEDY, frequency_penalty=9.0), b"", [])
    assert s.launch(logits, [0], [0]).read() == [Drawn(1)]


def test_rows_come_and_go_with_edits_and_histories_of_any_size() -> None:
    """Each token that a row draws costs it 5 of that token's bias, whatever else moves around in the memory behind it."""
    choose = random.Random(0)
    s, scores = sampler(64, 16), dict[int, dict[int, float]]()
    for _ in range(300):
        row = choose.randrange(16)
        if row in scores:
            s.stop(row)
            del scores[row]
        else:
            bias = {i: float(choose.randrange(1, 40)) for i in choose.sample(range(64), choose.randrange(1, 60))}
            told = choose.choices(range(64), k=choose.randrange(4))
            s.start(row, replace(GREEDY, frequency_penalty=5.0, logit_bias=tuple(bias.items())), b"", told)
            scores[row] = {i: bias.get(i, 0.0) - 5.0 * told.count(i) for i in range(64)}
        rows = choose.sample(sorted(scores), choose.randrange(len(scores) + 1))
        expected = [max(scores[r], key=lambda i: (scores[r][i], -i)) for r in rows]
        assert tokens(s, torch.zeros(len(rows), 64), rows, [1] * len(rows)) == expected
        for r, token in zip(rows, expected, strict=True):
            scores[r][token] -= 5.0


def test_log_probabilities_are_of_raw_logits_for_rows_that_ask() -> None:
    s = sampler(3)
    s.start(0, replace(GREEDY, logprobs=2, logit_bias=((2, 50.0),), temperature=0.0), b"", [])
    s.start(1, GREEDY, b"", [])
    s.start(2, replace(GREEDY, logprobs=0), b"", [])
    s.start(3, replace(GREEDY, logprobs=20), b"", [])
    row = torch.tensor([0.1, 0.6, 0.3]).log() + 7.0
    first, second, third, fourth = s.launch(row.expand(4, -1), [0, 1, 2, 3], [0] * 4).read()
    logs = {i: pytest.approx(v, abs=1e-5) for i, v in enumerate(torch.tensor([0.1, 0.6, 0.3]).log().tolist())}
    assert first == Drawn(2, TokenLogprobs(logs[2], ((1, logs[1]), (2, logs[2]))))  # type: ignore[arg-type]
    assert second == Drawn(1)
    assert third == Drawn(1, TokenLogprobs(logs[1]))  # type: ignore[arg-type]
    assert fourth.logprobs is not None and [i for i, _ in fourth.logprobs.top] == [1, 2, 0]


def test_a_broken_row_has_an_error_and_no_log_probabilities() -> None:
    s = sampler(3)
    s.start(0, replace(FREE, logprobs=1), b"", [])
    s.start(1, replace(FREE, logprobs=1, stop_token_ids=(0, 1, 2), min_tokens=9), b"", [])
    s.start(2, replace(FREE, top_k=1, logprobs=1), b"", [])
    broken, nothing, fine = s.launch(
        torch.tensor([[0.0, float("nan"), 0.0], [0.0] * 3, [0.0] * 3]), [0, 1, 2], [0] * 3
    ).read()
    assert broken.error and "NaN" in broken.error and broken.logprobs is None and broken.token_id == 0
    assert nothing.error and "banned" in nothing.error and nothing.logprobs is None
    assert fine.error is None and fine.token_id == 0 and fine.logprobs is not None


def test_wrong_shapes_and_ids_are_named() -> None:
    s = sampler(4)
    s.start(0, GREEDY, b"", [])
    with pytest.raises(ValueError, match=r"\(1, 5\).*1 rows.*4 ids"):
        s.launch(torch.zeros(1, 5), [0], [0])
    with pytest.raises(ValueError, match="2 rows"):
        s.launch(torch.zeros(1, 4), [0, 0], [0])
    with pytest.raises(ValueError, match=r"logit_bias.*there are 4"):
        s.start(1, replace(GREEDY, logit_bias=((4, 1.0),), frequency_penalty=1.0), b"", [1])
    s.start(1, GREEDY, b"", [])
    with pytest.raises(ValueError, match="vocabulary of 2000000"):
        sampler(2_000_000)


def test_tiny_temperatures_are_nearly_greedy() -> None:
    s = sampler(50)
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    for row, temperature in enumerate([1e-300, 1e-9, 1e-4]):
        s.start(row, replace(FREE, temperature=temperature), b"", [])
        assert {tokens(s, logits, [row], [p])[0] for p in range(20)} == {int(logits.argmax())}


@pytest.mark.gpu
def test_launches_never_wait_for_the_device_and_draw_what_the_cpu_draws() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
    vocab = 32_003
    fast, slow = Sampler(vocab, 8, "cuda", select_kernels("cuda")), sampler(vocab)
    plans = [
        (GREEDY, b"", []),
        (replace(FREE, seed=1, top_p=0.9, logprobs=3), b"", []),
        (replace(FREE, seed=2, top_k=40, temperature=0.7, repetition_penalty=1.2), packed(*range(300)), [5, 5, 6]),
        (replace(FREE, seed=3, min_p=0.05, frequency_penalty=0.5, logit_bias=((3, 5.0), (4, -5.0))), b"", [7]),
        (replace(FREE, seed=4, min_tokens=9, eos_token_ids=(2,), presence_penalty=0.3, logprobs=0), b"", []),
    ]
    steps = [torch.randn(5, vocab, generator=torch.Generator().manual_seed(i)) * 3 for i in range(6)]
    on_gpu = [x.cuda() for x in steps]
    fast.warm_up(torch.float32)
    draws = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row, plan in enumerate(plans):
            fast.start(row, *plan)
        for i, x in enumerate(on_gpu):
            draws.append(fast.launch(x, range(5), [i] * 5))
        fast.stop(2)
        fast.start(2, *plans[2])
        draws.append(fast.launch(on_gpu[0], range(5), [0] * 5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for row, plan in enumerate(plans):
        slow.start(row, *plan)
    for i, x in enumerate([*steps, steps[0]]):
        if i == len(steps):
            slow.stop(2)
            slow.start(2, *plans[2])
        expected = slow.launch(x, range(5), [i % len(steps)] * 5).read()
        got = draws[i].read()
        assert [d.token_id for d in got] == [d.token_id for d in expected]
        for mine, theirs in zip(got, expected, strict=True):
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            if mine.logprobs and theirs.logprobs:
                assert mine.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)
                assert [t for t, _ in mine.logprobs.top] == [t for t, _ in theirs.logprobs.top]


def masks(vocab: int, *rows: tuple[int, set[int]]) -> RowMasks:
    """`rows`: (index in the batch, ids that are allowed)."""
    bits = torch.zeros(len(rows), -(-vocab // 32), dtype=torch.int64)
    for line, (_, ids) in enumerate(rows):
        for id in ids:
            bits[line, id // 32] |= 1 << id % 32
    return RowMasks(tuple(i for i, _ in rows), bits.to(torch.int32))  # the 32nd bit is a sign


@pytest.mark.parametrize("vocab", [31, 64, 100, 4097])
def test_masks_ban_everything_else_in_their_rows_alone(vocab: int) -> None:
    s = sampler(vocab)
    plans = [GREEDY, replace(FREE, top_p=0.9), replace(FREE, frequency_penalty=1.0, logit_bias=((3, 100.0),)), FREE]
    for row, plan in enumerate(plans):
        s.start(row, plan, b"", [])
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    before, free = logits.clone(), tokens(s, logits, range(4), [0] * 4)
    for allowed in ({0}, {vocab - 1}, {5, 30}, {1, 2, vocab - 2}):
        draw = s.launch(logits, range(4), [0] * 4, masks(vocab, (2, allowed), (0, allowed)))
        drawn = [d.token_id for d in draw.read()]
        assert {drawn[0], drawn[2]} <= allowed and [drawn[1], drawn[3]] == [free[1], free[3]]
        assert drawn[0] == max(allowed, key=lambda t: float(logits[0, t]))
    assert logits.equal(before), "the model's logits are not the sampler's to change"
    nothing = s.launch(logits, range(4), [0] * 4, masks(vocab, (1, set()))).read()
    assert [d.error is None for d in nothing] == [True, False, True, True] and "grammar" in str(nothing[1].error)


def test_logprobs_are_of_the_logits_as_they_are() -> None:
    s = sampler(40)
    s.start(0, replace(GREEDY, logprobs=2), b"", [])
    logits = torch.arange(40.0)[None]
    (drawn,) = s.launch(logits, [0], [0], masks(40, (0, {3, 7}))).read()
    logs = logits[0].log_softmax(-1).tolist()
    assert drawn.token_id == 7 and drawn.logprobs is not None
    assert drawn.logprobs.logprob == pytest.approx(logs[7]) and [t for t, _ in drawn.logprobs.top] == [39, 38]
