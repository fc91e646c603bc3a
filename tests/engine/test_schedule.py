"""The step plan is pure: budgets, order, cuts and progress, on random sequences too."""

from hypothesis import given
from hypothesis import strategies as st

from twinflow.engine.schedule import Chunk, SequenceView, plan_step

views = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 300), st.one_of(st.none(), st.integers(0, 700))), max_size=12
).map(lambda rows: [SequenceView(str(i), p, p + n, cut) for i, (p, n, cut) in enumerate(rows)])


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
        if s.cut is not None and s.position < s.cut < s.target:
            assert s.position + chunk.tokens <= s.cut
    decoding = [s.id for s in sequences if s.remaining_tokens == 1]
    assert [c.id for c in plan if by_id[c.id].remaining_tokens == 1] == decoding[:step_tokens]


def test_decode_is_never_stalled_by_a_long_prefill() -> None:
    plan = plan_step([SequenceView("p", 0, 10_000), SequenceView("d", 50, 51)], 256, 512)
    assert plan == (Chunk("d", 1), Chunk("p", 255))


def test_a_chunk_ends_at_the_cut_then_runs_on() -> None:
    assert plan_step([SequenceView("a", 0, 130, 128)], 512, 512) == (Chunk("a", 128),)
    assert plan_step([SequenceView("a", 128, 130, 128)], 512, 512) == (Chunk("a", 2),)


def test_short_prompts_share_a_step() -> None:
    plan = plan_step([SequenceView(str(i), 0, 40) for i in range(5)], 100, 512)
    assert plan == (Chunk("0", 40), Chunk("1", 40), Chunk("2", 20))
