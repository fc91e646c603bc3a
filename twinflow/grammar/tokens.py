"""A grammar library for tests that have no tokenizer: a grammar is a JSON list of replies, each a list of token ids."""

import json
from dataclasses import dataclass, field

from twinflow.contracts.errors import BadRequest
from twinflow.contracts.requests import Grammar
from twinflow.grammar.base import Compiled, Matcher, Row


@dataclass
class TokenCompiler:
    """Understands every kind alike. `compiled` counts the calls."""

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    compiled: int = 0

    def compile(self, grammar: Grammar) -> Compiled:
        self.compiled += 1
        try:
            replies = [tuple(map(int, reply)) for reply in json.loads(grammar.text)]
        except (ValueError, TypeError) as e:
            raise BadRequest(f"{grammar.field}: {e}", param=grammar.field) from None
        if not replies:
            raise BadRequest(f"{grammar.field}: no reply is allowed", param=grammar.field)
        return TokenLists(tuple(replies), self.eos_token_ids)


@dataclass(frozen=True)
class TokenLists:
    replies: tuple[tuple[int, ...], ...]
    eos_token_ids: tuple[int, ...]

    def start(self) -> Matcher:
        return TokenMatcher(self)


@dataclass
class TokenMatcher:
    lists: TokenLists
    taken: tuple[int, ...] = field(default=())

    @property
    def complete(self) -> bool:
        return not self._next() and self.taken in self.lists.replies

    def accept(self, token_id: int) -> None:
        ends = self.taken in self.lists.replies and token_id in self.lists.eos_token_ids
        if not ends and token_id not in self._next():
            raise BadRequest(f"token {token_id} is not allowed after {self.taken}")
        self.taken += () if ends else (token_id,)

    def fill(self, row: Row) -> None:
        row[:] = 0
        ends = self.lists.eos_token_ids if self.taken in self.lists.replies else ()
        bits = row.view("uint32")
        for token in (*self._next(), *ends):
            bits[token // 32] |= 1 << token % 32

    def _next(self) -> set[int]:
        n = len(self.taken)
        return {reply[n] for reply in self.lists.replies if len(reply) > n and reply[:n] == self.taken}
