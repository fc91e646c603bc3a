"""What the engine asks of a grammar library.

    Compiler.compile(grammar) ─▶ Compiled, kept by its text (`cache.py`)
    Compiled.start()          ─▶ Matcher, one per reply: fill(row) · accept(token) · fill(row) · accept(token) …

`llguidance.py` is the real one, `tokens.py` a small one over token ids for tests. A row of a mask is (words,) int32: token t may
come next iff bit t % 32 of word t // 32 is set.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinflow.contracts.errors import BadRequest
from twinflow.contracts.requests import Grammar

Row = NDArray[np.int32]

# Between the parts of a JSON text. A small model that may write any white space can do so for ever: one space, or one line break
# with its indentation.
JSON_SPACE = r" |\n[ \t]{0,20}"


def is_marker(name: str, special: bool) -> bool:
    """Whether an added token of a tokenizer is a mark rather than text: no grammar can spell it, a Lark grammar refers to it as
    `<[id]>`."""
    return special or (name.startswith("<") and name.endswith(">"))


def words_of(vocab_size: int) -> int:
    """Of one row."""
    return (vocab_size + 31) // 32


class TooComplex(BadRequest):
    """The grammar exceeds what one request may cost, at once or later in the reply."""


class Matcher(Protocol):
    """Where one reply stands in its grammar. Not thread-safe; may move from thread to thread."""

    @property
    def complete(self) -> bool:
        """The grammar is fulfilled and nothing but the end may follow."""
        ...

    def accept(self, token_id: int) -> None:
        """The reply goes on with this token, which may be one of the model's ending ones. Raises BadRequest if the grammar does
        not allow it here."""
        ...

    def fill(self, row: Row) -> None:
        """Writes what may come next; the model's ending tokens exactly where the grammar is fulfilled. Raises TooComplex."""
        ...


class Compiled(Protocol):
    """Of one text. Thread-safe."""

    def start(self) -> Matcher:
        """At the beginning of a reply."""
        ...


class Compiler(Protocol):
    """For one vocabulary. Thread-safe; may take its time."""

    vocab_size: int

    def compile(self, grammar: Grammar) -> Compiled:
        """Raises BadRequest, naming `grammar.field` and the reason, for what is no grammar, can never be fulfilled or is too
        complex."""
        ...
