"""What a guide makes of a grammar's masks, with a small grammar of token lists; how it ends replies in the engine:
`tests/engine/test_grammar.py`."""

import json

import numpy as np
import pytest

from tests.grammar.conftest import allowed, grammar
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.requests import SamplingParams
from twinflow.grammar.base import Row, TooComplex, words_of
from twinflow.grammar.guide import Guide
from twinflow.grammar.tokens import TokenCompiler

VOCAB, EOS, STOP, THINK, END = 100, 7, 8, 90, 91


def guide(*replies: list[int], think_start: int | None = None, think_end: int | None = None, **params: object) -> Guide:
    of = grammar("grammar", json.dumps(replies), think_start=think_start, think_end=think_end)
    matcher = TokenCompiler(VOCAB, (EOS,)).compile(of).start()
    sampling = SamplingParams(max_tokens=9, seed=0, grammar=of, eos_token_ids=(EOS,), stop_token_ids=(STOP,), **params)  # type: ignore[arg-type]
    return Guide(matcher, sampling, (EOS,))


def after(g: Guide, *generated: int) -> set[int]:
    row = np.zeros(words_of(VOCAB), dtype=np.int32)
    g.fill(generated, row)
    return {t for t in allowed(row) if t < VOCAB}


EVERYTHING = set(range(VOCAB))


def test_follows_from_anywhere() -> None:
    """A worker that goes on where another one stopped gets all tokens at once."""
    at_once, one_by_one = guide([10, 11, 12], [10, 20]), guide([10, 11, 12], [10, 20])
    assert after(one_by_one) == {10} and after(one_by_one, 10) == {11, 20}
    assert after(one_by_one, 10, 11) == after(at_once, 10, 11) == {12}
    at_once.follow((10, 11, 12))
    assert at_once.complete and not one_by_one.complete


def test_the_end() -> None:
    assert after(guide([10], [10, 11]), 10) == {11, EOS}
    assert after(guide([10], [10, 11], min_tokens=2), 10) == {11}
    assert after(guide([10], [10, 11], ignore_eos=True), 10) == {11}
    assert after(guide([10, STOP], [10, 9], min_tokens=2), 10) == {9}
    assert after(guide([10], min_tokens=5), 10) == {EOS}  # nothing else is left
    assert after(guide([10], ignore_eos=True), 10) == {EOS}


def test_thoughts() -> None:
    opened = guide([10], think_end=END)
    assert after(opened) == after(opened, 1, 2) == EVERYTHING - {EOS, STOP}
    assert after(opened, 1, 2, END) == {10} and not opened.complete
    opened.follow((1, 2, END, 10))
    assert opened.complete
    may = guide([10], think_start=THINK, think_end=END)
    assert after(may) == {10, THINK}
    assert after(may, THINK, 5) == EVERYTHING - {EOS, STOP}
    assert after(may, THINK, 5, END) == {10}
    assert after(guide([10, THINK], think_start=THINK, think_end=END), 10) == {THINK}  # no thoughts later on


def test_a_token_that_is_not_allowed_is_an_error_and_masks_allow_everything() -> None:
    g = guide([10, 11])
    assert after(g, 12) == EVERYTHING
    assert isinstance(g.error, BadRequest) and not g.complete


def test_a_mask_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    g = guide([10, 11])

    def fails(row: Row) -> None:
        raise TooComplex("too much", param="f")

    monkeypatch.setattr(g._matcher, "fill", fails)
    assert after(g) == EVERYTHING and isinstance(g.error, TooComplex)
    g.follow((55,))
    assert g.error.message == "too much"


def test_ending_ids_beyond_the_vocabulary_are_no_matter() -> None:
    of = grammar("grammar", "[[10]]")
    params = SamplingParams(max_tokens=9, seed=0, grammar=of, eos_token_ids=(100_000,), min_tokens=3)
    g = Guide(TokenCompiler(VOCAB).compile(of).start(), params, (100_000,))
    assert after(g) == {10}
