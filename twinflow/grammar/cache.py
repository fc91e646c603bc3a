"""Compiled grammars by their text: the least recently used ones go. The same text asked for twice at once is compiled once."""

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import NamedTuple

from twinflow.contracts.requests import Grammar, GrammarKind
from twinflow.grammar.base import Compiled, Compiler

MAX_GRAMMARS = 256


class Key(NamedTuple):
    kind: GrammarKind
    text: str
    lenient: bool
    field: str  # errors name it, later ones too


class GrammarCache:
    """A `Compiler` before a compiler. Thread-safe. Texts are bounded, so a bound on their number bounds the memory."""

    def __init__(self, compiler: Compiler, limit: int = MAX_GRAMMARS) -> None:
        self.vocab_size = compiler.vocab_size
        self._compiler = compiler
        self._limit = limit
        self._lock = threading.Lock()
        self._known: OrderedDict[Key, Future[Compiled]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def compile(self, grammar: Grammar) -> Compiled:
        """As the compiler's; what could not be compiled is not kept."""
        key = Key(grammar.kind, grammar.text, grammar.lenient, grammar.field)
        with self._lock:
            found = self._known.get(key)
            mine = None if found is not None else Future[Compiled]()
            if mine is not None:
                self._known[key] = mine
                if len(self._known) > self._limit:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(key)
        if found is not None:
            return found.result()
        assert mine is not None
        try:
            mine.set_result(self._compiler.compile(grammar))
        except BaseException as e:
            with self._lock:
                if self._known.get(key) is mine:
                    del self._known[key]
            mine.set_exception(e)
        return mine.result()
