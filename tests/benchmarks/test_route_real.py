"""Sessions of a trace made small enough for the shipped model."""

import pytest

from benchmarks.route_real import FIRST_TOKEN, VOCABULARY, scaled
from services.router.bench.prompt import Run
from services.router.bench.trace import REPLY_IDS, Session, Turn


def session(*prompts: tuple[int, int]) -> Session:
    """Turns of (block id, tokens), each with a reply of 96 tokens."""
    return Session(0.0, tuple(Turn((Run(id, n),), 96, REPLY_IDS + id) for id, n in prompts))


def test_what_was_shared_stays_shared_and_nothing_else_is() -> None:
    one, two = scaled([session((5, 480), (6, 480)), session((5, 480), (7, 480))], divide=48, turns=5, limit=1000)
    runs = [run for s in (one, two) for turn in s.turns for run in turn.new]
    assert [run.tokens for run in runs] == [10] * 4 and all(t.reply_tokens == 2 for t in one.turns)
    ids = [run.token_id for run in runs] + [turn.reply_id for s in (one, two) for turn in s.turns]
    assert ids[0] == ids[2] and len(set(ids)) == 6
    assert all(FIRST_TOKEN <= id < VOCABULARY for id in ids)


def test_sessions_end_where_the_model_does() -> None:
    (kept,) = scaled([session(*((k, 480) for k in range(9)))], divide=48, turns=9, limit=50)
    assert len(kept.turns) == 4


def test_too_many_blocks_say_so() -> None:
    with pytest.raises(SystemExit, match="fewer --sessions"):
        scaled([session(*((k, 480) for k in range(VOCABULARY)))], divide=48, turns=VOCABULARY, limit=10**9)
