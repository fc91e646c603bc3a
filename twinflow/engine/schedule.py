"""Which tokens run in the next step: a pure function of the running sequences and two budgets.

Mixed steps: every decoding sequence gets its one token first (so prefill never stalls running streams), what is left of
the step's budget goes to prefill chunks in arrival order. States worth keeping are left behind in passing; a chunk ends early
only where one is due that the kernels cannot leave behind, and amid a prompt where the next chunk can.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinflow.kernels.base import STATE_CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class SequenceView:
    """`position` tokens are fed, `target` are known (fed + waiting to be fed); target > position. `cuts`: where states are
    kept, ascending."""

    id: str
    position: int
    target: int
    cuts: Iterable[int] = ()

    @property
    def remaining_tokens(self) -> int:
        return self.target - self.position

    def chunk_tokens(self, most: int) -> int:
        """Of the next chunk, at most `most`. It crosses no cut but at whole chunks of the state kernels from its start, and
        ends, if it isn't the last one, where the next one starts in step with positions (cuts are at whole blocks)."""
        end = min(self.target, self.position + most)
        if end < self.target and (whole := end // STATE_CHUNK_TOKENS * STATE_CHUNK_TOKENS) > self.position:
            end = whole
        for cut in self.cuts:
            if cut >= end:
                break
            if cut > self.position and (cut - self.position) % STATE_CHUNK_TOKENS:
                end = cut
        return end - self.position


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
        begun = len(chunks) > len(decoding)
        if s.remaining_tokens == 1 or (begun and left < min(STATE_CHUNK_TOKENS, s.remaining_tokens)):
            continue  # a scrap of a further prompt would only put it out of step
        tokens = s.chunk_tokens(min(max(1, chunk_tokens), left))
        chunks.append(Chunk(s.id, tokens))
        left -= tokens
    return tuple(chunks)
