from hypothesis import example, given
from hypothesis import strategies as st

from twinflow.contracts.groups import GroupKind
from twinflow.contracts.hits import GroupHit, usable_tokens


def attention(tokens, name="attention"):
    return GroupHit(name, GroupKind.ATTENTION, tokens)


def state(*checkpoints, name="state"):
    points = tuple(sorted(checkpoints))
    return GroupHit(name, GroupKind.STATE, points[-1] if points else 0, points)


HITS = st.lists(
    st.one_of(
        st.integers(0, 12).map(attention),
        st.lists(st.integers(1, 12), unique=True, max_size=5).map(lambda ps: state(*ps)),
    ),
    max_size=4,
)


def resumable(hit, position):
    """Whether one group can continue after `position` tokens."""
    if position == 0:
        return True
    return position <= hit.tokens if hit.kind is GroupKind.ATTENTION else position in hit.checkpoints


@given(HITS, st.integers(0, 13))
@example([attention(6), state(4, 8)], 13)
@example([], 5)
def test_usable_is_the_longest_prefix_that_every_group_can_resume(hits, prompt_tokens):
    positions = range(max(1, prompt_tokens)) if hits else [0]
    assert usable_tokens(hits, prompt_tokens) == max(p for p in positions if all(resumable(h, p) for h in hits))


def test_it_is_not_the_minimum():
    assert usable_tokens([attention(6), state(4, 8)], 100) == 4


def test_attention_alone_is_worth_nothing_to_a_hybrid():
    assert usable_tokens([attention(6), state()], 100) == 0


def test_the_last_token_must_run():
    assert usable_tokens([attention(8), state(4, 8)], 8) == 4
    assert usable_tokens([attention(8)], 8) == 7
    assert usable_tokens([attention(8)], 0) == 0
