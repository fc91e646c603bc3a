"""What one epoch consists of: the books once, and chats drawn beside them. train.py asks for epochs."""

import random
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from tools.train_tiny import chats
from tools.train_tiny.corpus import known_tools, read_books, read_dialogs
from tools.train_tiny.rows import Encoded, Encoder, Rows, concatenate


@dataclass(frozen=True, slots=True)
class Amounts:
    """Chats an epoch. The pool of stories is larger, so that a story comes back only after several epochs."""

    story_pool: int = 72_000
    stories: int = 12_000
    orders: int = 1_700  # half of them
    sums: int = 4_000
    small_talk_times: int = 6
    distracted: int = 200


class Mixture:
    """Training epochs and held-out rows, all drawn from one seed."""

    def __init__(self, corpus: Path, tokenizer: PreTrainedTokenizerFast, row_tokens: int, amounts: Amounts) -> None:
        self._rng = random.Random(1)
        self._amounts = amounts
        self._encoder = Encoder(tokenizer, row_tokens)
        self._row_tokens = row_tokens
        books, dialogs = read_books(corpus), list(read_dialogs(corpus))
        self.tools = known_tools([d for d in dialogs if not d.held_out])
        self._stream = self._encoder.book_stream(b for b in books if not b.held_out)
        held_out_stream = self._encoder.book_stream(b for b in books if b.held_out)
        self.held_out_books = self._encoder.book_rows(held_out_stream, 0)
        self.held_out_chats = self._dialog_rows([d for d in dialogs if d.held_out])
        train = [d for d in dialogs if not d.held_out]
        drawn = list(chats.stories([b for b in books if not b.held_out], amounts.story_pool, self._rng))
        self._stories = self._encoder.chats(drawn)
        # Each order twice, since the tools on offer and the system line are drawn anew.
        self._orders = self._encoder.chats(c for _ in range(2) for c in chats.orders(train, self.tools, self._rng))
        self._problems = self._encoder.chats(chats.problems(train))
        distracted = drawn[: amounts.distracted * 4] + list(chats.problems(train))[: amounts.distracted]
        self._distracted = self._encoder.chats(chats.distracted(distracted, self.tools, self._rng))
        self._epoch = 0

    def next_epoch(self) -> Rows:
        a, rng = self._amounts, self._rng
        drawn = self._slice(self._stories, a.stories) + self._slice(self._orders, a.orders) + self._problems
        drawn += self._encoder.chats(chats.sums(a.sums, rng)) + rng.sample(self._distracted, a.distracted)
        drawn += self._encoder.chats(chats.small_talk(a.small_talk_times))
        rng.shuffle(drawn)
        self._epoch += 1
        books = self._encoder.book_rows(self._stream, rng.randrange(self._row_tokens))
        return concatenate([books, self._encoder.chat_rows(drawn)]).shuffled(rng)

    def _slice(self, pool: list[Encoded], count: int) -> list[Encoded]:
        start = self._epoch * count % len(pool)
        return (pool[start:] + pool[:start])[:count]

    def _dialog_rows(self, dialogs: list) -> Rows:
        drawn = [*chats.problems(dialogs), *chats.orders(dialogs, self.tools, self._rng)]
        return self._encoder.chat_rows(self._encoder.chats(drawn))
