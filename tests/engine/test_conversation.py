"""What a conversation costs: the worker that served the last turn recomputes the new tokens and one more, nothing else."""

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair
from tests.models.tiny import prompt

NEW = 10


@pytest.mark.parametrize("first_remote", [True, False], ids=["handed off", "local"])
def test_six_turns(pair: Pair, oracle: Oracle, first_remote: bool) -> None:
    talk, fed = prompt(1, 150), 0
    for turn in range(6):
        got = (pair.remote if first_remote and turn == 0 else pair.decode.local)(talk, max_tokens=NEW)
        assert got.tokens == oracle(talk, NEW)
        assert got.stats.decode_resumed_tokens == fed
        if turn:
            assert len(talk) - fed == 25 + 1  # the user's new tokens, and the reply's last one, which was never fed
        fed = len(talk) + NEW - 1
        talk = talk + got.tokens + prompt(100 + turn, 25)
    assert pair.quiet()


def test_a_template_that_rewrites_the_reply_resumes_at_the_prompts_end(pair: Pair, oracle: Oracle) -> None:
    """E.g. one that drops the reasoning of earlier turns: the reply's tokens differ, the prompt's state is still there."""
    talk = prompt(1, 150)
    first = pair.remote(talk, max_tokens=NEW)
    rewritten = talk + first.tokens[4:] + prompt(2, 25)
    got = pair.decode.local(rewritten, max_tokens=NEW)
    assert got.tokens == oracle(rewritten, NEW)
    assert got.stats.decode_resumed_tokens == len(talk)


def test_cache_salt_isolates(pair: Pair, oracle: Oracle) -> None:
    p = prompt(1, 150)
    pair.decode.local(p, max_tokens=NEW)
    pair.decode.root = b"another tenant's"
    got = pair.decode.local(p, max_tokens=NEW)
    assert got.tokens == oracle(p, NEW)
    assert (got.stats.decode_attention_tokens, got.stats.decode_checkpoints) == (0, ())
