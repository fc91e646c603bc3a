"""Compiled grammars are kept by their text, boundedly."""

import threading
from dataclasses import replace

import pytest

from tests.grammar.conftest import grammar
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.requests import Grammar
from twinflow.grammar.base import Compiled
from twinflow.grammar.cache import GrammarCache
from twinflow.grammar.tokens import TokenCompiler

A, B, C = (grammar("grammar", f"[[{i}]]") for i in range(3))


def test_the_same_text_is_compiled_once_and_the_least_used_goes() -> None:
    inner = TokenCompiler(10)
    cache = GrammarCache(inner, limit=2)
    first = cache.compile(A)
    assert cache.compile(A) is first and inner.compiled == 1
    assert cache.compile(replace(A, think_end=3)) is first  # thoughts are the guide's matter
    cache.compile(B)
    cache.compile(A)
    cache.compile(C)  # B goes
    assert len(cache) == 2 and inner.compiled == 3
    assert cache.compile(A) is first
    cache.compile(B)
    assert inner.compiled == 4


@pytest.mark.parametrize("more", [{"lenient": True}, {"field": "other"}], ids=["lenient", "field"])
def test_what_makes_a_difference(more: dict[str, object]) -> None:
    cache = GrammarCache(TokenCompiler(10))
    assert cache.compile(replace(A, **more)) is not cache.compile(A)  # type: ignore[arg-type]


def test_failures_are_not_kept() -> None:
    inner = TokenCompiler(10)
    cache = GrammarCache(inner)
    for _ in range(2):
        with pytest.raises(BadRequest):
            cache.compile(grammar("grammar", "nonsense"))
    assert inner.compiled == 2 and len(cache) == 0


def test_asked_for_at_once_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, may, begun = TokenCompiler(10), threading.Event(), threading.Event()
    compile = inner.compile

    def slow(of: Grammar) -> Compiled:
        begun.set()
        assert may.wait(30)
        return compile(of)

    monkeypatch.setattr(inner, "compile", slow)
    cache, got = GrammarCache(inner), []
    threads = [threading.Thread(target=lambda: got.append(cache.compile(A))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    may.set()
    for thread in threads:
        thread.join()
    assert inner.compiled == 1 and all(g is got[0] for g in got) and len(got) == 4
