"""Which tokens run in the next step: a pure function of the running sequences and two budgets.

Mixed steps: every decoding sequence gets its one token first (so prefill never stalls running streams), what is left of
the step's budget goes to prefill chunks in arrival order. A chunk ends early at `cut`, the next position whose state is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceView:
    """`position` tokens are fed, `target` are known (fed + waiting to be fed); target > position."""

    id: str
    position: int
    target: int
    cut: int | None = None  # a chunk must not cross it; ignored unless position < cut < target

    @property
    def remaining_tokens(self) -> int:
        return self.target - self.position


@dataclass(frozen=True, slots=True)
class Chunk:
    """Feed the next `tokens` tokens of sequence `id`."""

    id: str
    tokens: int


def plan_step(sequences: Sequence[SequenceView], step_tokens: int, chunk_tokens: int) -> tuple[Chunk, ...]:
    """Chunks of the next step, at most `step_tokens` tokens in all and `chunk_tokens` per prefilling sequence.

    `sequences` in arrival order. Never empty unless `sequences` is: each budget is at least one token.
    """
    left = max(1, step_tokens)
    decoding = [s for s in sequences if s.remaining_tokens == 1][:left]
    chunks = [Chunk(s.id, 1) for s in decoding]
    left -= len(chunks)
    for s in sequences:
        if left <= 0:
            break
        if s.remaining_tokens == 1:
            continue
        tokens = min(s.remaining_tokens, max(1, chunk_tokens), left)
        if s.cut is not None and s.position < s.cut < s.target:
            tokens = min(tokens, s.cut - s.position)
        chunks.append(Chunk(s.id, tokens))
        left -= tokens
    return tuple(chunks)
