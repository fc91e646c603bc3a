"""Holds one reply to its grammar: thoughts first where there are any, then the grammar's own matcher; what may end the reply."""

from collections.abc import Sequence

import numpy as np

from twinflow.contracts.errors import BadRequest
from twinflow.contracts.requests import SamplingParams
from twinflow.grammar.base import Matcher, Row


class Guide:
    """Of one request. Used by one thread at a time: the loop that takes tokens, or the thread that computes its mask.

    `error` is set when the reply cannot be held any further; masks allow everything from then on.
    """

    def __init__(self, matcher: Matcher, params: SamplingParams, model_eos: Sequence[int]) -> None:
        """`model_eos`: what the matcher knows as ending tokens."""
        assert params.grammar is not None
        self._matcher = matcher
        self._think_end = params.grammar.think_end
        self._think_start = params.grammar.think_start
        self._min_tokens = params.min_tokens
        eos = {*params.eos_token_ids, *model_eos}
        self._eos = _mask(eos)
        self._ending = _mask({*params.stop_token_ids, *eos})
        self._ignore_eos = params.ignore_eos
        self._thinking = self._think_end is not None and self._think_start is None
        self._followed = 0  # tokens of the reply
        self.error: BadRequest | None = None

    @property
    def complete(self) -> bool:
        """Nothing may follow."""
        return self.error is None and not self._thinking and self._matcher.complete

    def follow(self, generated: Sequence[int]) -> None:
        """The reply so far; what was followed before is passed over. Sets `error` if it has left the grammar."""
        fresh = generated[self._followed :]
        for at, token in enumerate(fresh, self._followed):
            if self._thinking:
                self._thinking = token != self._think_end
            elif at == 0 and token == self._think_start:
                self._thinking = True
            elif self.error is None:
                try:
                    self._matcher.accept(token)
                except BadRequest as e:
                    self.error = e
        self._followed = len(generated)

    def fill(self, generated: Sequence[int], row: Row) -> None:
        """What may come after `generated`, into a row of at least as many words as the vocabulary has."""
        self.follow(generated)
        if self.error is not None:
            row[:] = -1
            return
        if self._thinking:
            row[:] = -1
            _clear(row, self._ending)
            return
        try:
            self._matcher.fill(row)
        except BadRequest as e:
            self.error = e
            row[:] = -1
            return
        if not generated and self._think_start is not None:
            row.view(np.uint32)[self._think_start // 32] |= np.uint32(1 << self._think_start % 32)
        if self._ignore_eos:
            _clear_if_rest(row, self._eos)
        if len(generated) < self._min_tokens:
            _clear_if_rest(row, self._ending)


def _mask(ids: set[int]) -> dict[int, int]:
    """Word → bits."""
    words: dict[int, int] = {}
    for id in ids:
        words[id // 32] = words.get(id // 32, 0) | 1 << id % 32
    return words


def _clear(row: Row, mask: dict[int, int]) -> None:
    bits = row.view(np.uint32)
    for word, value in mask.items():
        if word < len(bits):
            bits[word] &= np.uint32(~value & 0xFFFFFFFF)


def _clear_if_rest(row: Row, mask: dict[int, int]) -> None:
    """Unless nothing would be left: a grammar that is fulfilled and cannot go on ends the reply all the same."""
    bits = row.view(np.uint32)
    before = {word: bits[word] for word in mask if word < len(bits)}
    _clear(row, mask)
    if not row.any():
        for word, value in before.items():
            bits[word] = value
