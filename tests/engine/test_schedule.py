"""The step plan is pure: budgets, order, cuts and progress, on random sequences too."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinflow.contracts.checkpoints import checkpoint_positions
from twinflow.engine.schedule import Chunk, SequenceView, plan_step
from twinflow.kernels.base import STATE_CHUNK_TOKENS

views = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 300), st.lists(st.integers(0, 44).map(lambda n: 16 * n), max_size=6)),
    max_size=12,
).map(lambda rows: [SequenceView(str(i), p, p + n, sorted(set(cuts))) for i, (p, n, cuts) in enumerate(rows)])


@given(views, st.integers(1, 400), st.integers(1, 200))
def test_budgets_order_and_progress(sequences: list[SequenceView], step_tokens: int, chunk_tokens: int) -> None:
    by_id = {s.id: s for s in sequences}
    plan = plan_step(sequences, step_tokens, chunk_tokens)
    assert len({c.id for c in plan}) == len(plan)
    assert sum(c.tokens for c in plan) <= step_tokens
    assert bool(plan) == bool(sequences)
    for chunk in plan:
        s = by_id[chunk.id]
        assert 1 <= chunk.tokens <= min(s.remaining_tokens, max(chunk_tokens, 1))
        end = s.position + chunk.tokens
        assert not [c for c in s.cuts if s.position < c < end and (c - s.position) % STATE_CHUNK_TOKENS]
        if end < s.target and end not in s.cuts:
            assert end % STATE_CHUNK_TOKENS == 0 or end - s.position < STATE_CHUNK_TOKENS
    decoding = [s.id for s in sequences if s.remaining_tokens == 1]
    assert [c.id for c in plan if by_id[c.id].remaining_tokens == 1] == decoding[:step_tokens]


def test_decode_is_never_stalled_by_a_long_prefill() -> None:
    plan = plan_step([SequenceView("p", 0, 10_000), SequenceView("d", 50, 51)], 256, 512)
    assert plan == (Chunk("d", 1), Chunk("p", 192))


def test_a_chunk_runs_on_over_cuts_at_whole_chunks_of_the_kernels() -> None:
    assert plan_step([SequenceView("a", 0, 400, [128, 192, 384])], 512, 512) == (Chunk("a", 400),)
    assert plan_step([SequenceView("a", 70, 400, [128, 192])], 512, 512) == (Chunk("a", 58),)
    assert plan_step([SequenceView("a", 128, 400, [128, 192])], 512, 512) == (Chunk("a", 272),)
    assert plan_step([SequenceView("a", 0, 400, [64, 80, 160])], 512, 512) == (Chunk("a", 80),)


def test_beside_others_a_chunk_ends_where_the_next_one_can_leave_states_behind() -> None:
    plan = plan_step([SequenceView("p", 70, 10_000), SequenceView("d", 50, 51)], 512, 512)
    assert plan == (Chunk("d", 1), Chunk("p", 576 - 70))
    assert plan_step([SequenceView("p", 70, 10_000)], 40, 512) == (Chunk("p", 40),)


@pytest.mark.parametrize(
    ("tokens", "beside", "ends"),
    [
        (4096, 0, [4096]),
        (16384, 0, [16384]),
        (32768, 0, [16384, 32768]),
        (65536, 0, [16384, 32768, 49152, 65536]),
        (16384, 3, [16320, 16384]),
        (32768, 3, [16320, 32640, 32768]),
    ],
)
def test_a_long_prompt_takes_as_many_steps_as_its_tokens_need(tokens: int, beside: int, ends: list[int]) -> None:
    """Steps of 16,384 tokens, states every 6,336 as of a 4B model, in `beside` of the tokens others decode."""
    cuts = checkpoint_positions(0, 0, tokens, 64, 6336, tokens + 1000)
    position, found = 0, []
    while position < tokens:
        ahead = [c for c in cuts if c > position]
        views = [SequenceView(f"d{i}", 99, 100) for i in range(beside)]
        chunk = plan_step([*views, SequenceView("p", position, tokens, ahead)], 16384, 16384)[-1]
        position += chunk.tokens
        found.append(position)
    assert found == ends


def test_short_prompts_share_a_step() -> None:
    plan = plan_step([SequenceView(str(i), 0, 40) for i in range(5)], 100, 512)
    assert plan == (Chunk("0", 40), Chunk("1", 40))
    plan = plan_step([SequenceView(str(i), 0, n) for i, n in enumerate((400, 100, 30, 20))], 450, 512)
    assert plan == (Chunk("0", 400), Chunk("2", 30), Chunk("3", 20))


def test_the_first_prompt_goes_on_however_little_is_left() -> None:
    streams = [SequenceView(f"d{i}", 9, 10) for i in range(60)]
    assert plan_step([*streams, SequenceView("p", 0, 500)], 64, 512)[-1] == Chunk("p", 4)
