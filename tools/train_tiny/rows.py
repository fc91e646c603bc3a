"""Chats and book text become fixed-length rows of token ids for train.py: rendered, masked, packed.

A row holds whole chats side by side. `position` restarts at 0 with each of them; packed.py keeps them from seeing one
another. Book rows are one running text, cut at a new random offset every epoch.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from tools.train_tiny.chats import Chat
from tools.train_tiny.corpus import Book
from tools.train_tiny.tokenizer import END_OF_TEXT, TURN_END, TURN_START

Ids = np.ndarray  # uint16, one dimension


@dataclass(frozen=True, slots=True)
class Encoded:
    ids: Ids
    learned: np.ndarray  # bool, same length: does the loss count this token as a target?


@dataclass(frozen=True, slots=True)
class Rows:
    """`ids` and `learned` are (rows, length + 1): input [:, :-1], target [:, 1:]. `position` is (rows, length)."""

    ids: np.ndarray
    learned: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def shuffled(self, rng: random.Random) -> "Rows":
        order = np.random.default_rng(rng.getrandbits(64)).permutation(len(self))
        return Rows(self.ids[order], self.learned[order], self.position[order])


def concatenate(parts: Sequence[Rows]) -> Rows:
    return Rows(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("ids", "learned", "position")))


class Encoder:
    """The tokenizer with what rows need of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, row_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._row_tokens = row_tokens
        self._pad = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        self._end = tokenizer.convert_tokens_to_ids(TURN_END)
        self._answer = np.array(tokenizer(f"{TURN_START}assistant\n").input_ids)

    def chats(self, chats: Iterable[Chat]) -> list[Encoded]:
        """Only what the assistant says is learned, its end of turn included. Chats too long for a row are left out."""
        texts = [self._tokenizer.apply_chat_template(c.messages, tools=c.tools, tokenize=False) for c in chats]
        return [self._masked(ids) for ids in self._encode(texts) if len(ids) <= self._row_tokens + 1]

    def _masked(self, ids: Ids) -> Encoded:
        learned = np.zeros(len(ids), bool)
        ends = np.flatnonzero(ids == self._end)
        for start in np.flatnonzero(ids == self._answer[0]):
            first = start + len(self._answer)
            if np.array_equal(ids[start:first], self._answer):
                learned[first : ends[np.searchsorted(ends, start)] + 1] = True
        return Encoded(ids, learned)

    def book_stream(self, books: Iterable[Book]) -> Ids:
        return np.concatenate(self._encode([b.text + END_OF_TEXT for b in books]))

    def _encode(self, texts: list[str]) -> list[Ids]:
        """All cores, and without the character offsets that the usual call computes."""
        return [np.array(e.ids, np.uint16) for e in self._tokenizer.backend_tokenizer.encode_batch_fast(texts)]

    def book_rows(self, stream: Ids, offset: int) -> Rows:
        """Every token but the first is a target exactly once; `offset` tokens at the start and a tail are left over."""
        n = self._row_tokens
        count = (len(stream) - offset - 1) // n
        ids = np.lib.stride_tricks.sliding_window_view(stream[offset:], n + 1)[::n][:count]
        return Rows(np.array(ids), np.ones((count, n + 1), bool), np.tile(np.arange(n, dtype=np.int32), (count, 1)))

    def chat_rows(self, chats: Sequence[Encoded]) -> Rows:
        """First fit over the few rows that are still open, in the order given (shuffle before)."""
        size, rows, opened = self._row_tokens + 1, [], []  # type: int, list[list[Encoded]], list[tuple[int, int]]
        for chat in chats:
            fit = next((k for k, (_, free) in enumerate(opened) if free >= len(chat.ids)), None)
            if fit is None:
                rows.append([])
                opened = [*opened[-31:], (len(rows) - 1, size)]
                fit = len(opened) - 1
            row, free = opened[fit]
            rows[row].append(chat)
            opened[fit] = (row, free - len(chat.ids))
        ids = np.full((len(rows), size), self._pad, np.uint16)
        learned = np.zeros((len(rows), size), bool)
        position = np.zeros((len(rows), size), np.int32)
        for r, row in enumerate(rows):
            at = 0
            for chat in row:
                span = slice(at, at + len(chat.ids))
                ids[r, span], learned[r, span], position[r, span] = chat.ids, chat.learned, np.arange(len(chat.ids))
                at += len(chat.ids)
            position[r, at:] = np.arange(size - at)
        return Rows(ids, learned, position[:, :-1])
