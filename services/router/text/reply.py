"""The text of one reply as it grows: samples in, pieces out, stop strings held back, logprobs beside their text."""

from collections import deque
from collections.abc import Sequence

from services.router.text.stops import StopMatcher
from services.router.text.tokenizer import ModelText
from twinflow.contracts.facts import fact
from twinflow.contracts.requests import FinishReason, Sample


@fact(frozen=True, slots=True)
class TokenText:
    """A visible token with logprobs. `offset` = characters of the reply before it."""

    text: str
    raw: bytes
    logprob: float
    offset: int
    top: tuple[tuple[str, bytes, float], ...]


@fact(frozen=True, slots=True)
class Piece:
    """What may be shown now. `finish` is OpenAI's word, on the last piece only."""

    text: str
    tokens: tuple[TokenText, ...] = ()
    finish: str | None = None


class Reply:
    """Owned by one generation. After `finish` is set, further samples are ignored."""

    def __init__(self, text: ModelText, stops: Sequence[str], stop_ids: frozenset[int], logprobs: bool = False) -> None:
        """`stop_ids`: EOS and stop token ids, whose text is not shown when they end the reply. `logprobs`: samples have them."""
        self._text = text
        self._detokenizer = text.detokenizer()
        self._stops = StopMatcher(stops) if stops else None
        self.plain = not (stops or logprobs)  # nobody needs to know which text is whose token's
        self._stop_ids = stop_ids
        self._seen_chars = 0
        self._shown_chars = 0
        self._waiting: deque[TokenText] = deque()
        self.completion_tokens = 0
        self.finish: str | None = None
        self.matched_stop = False

    def push(self, samples: Sequence[Sample]) -> Piece:
        if self.plain:
            return Piece(self._plainly(samples), (), self.finish)
        out: list[str] = []
        for sample in samples:
            if self.finish is not None:
                break
            self.completion_tokens += 1
            if sample.finish is FinishReason.STOP and sample.token_id in self._stop_ids:
                self._end("stop", out)
                break
            self._add(sample, out)
            if self._stops is not None and self._stops.matched is not None:
                self.matched_stop, self.finish = True, "stop"
            elif sample.finish is not None:
                self._end(sample.finish.value, out)
        text = "".join(out)
        self._shown_chars += len(text)
        return Piece(text, self._shown_tokens(), self.finish)

    def push_plain(self, token_id: int) -> str:
        """As `push` of one token that ends nothing, in a plain reply."""
        self.completion_tokens += 1
        return self._detokenizer.push(token_id)

    def _plainly(self, samples: Sequence[Sample]) -> str:
        if self.finish is not None or not samples:
            return ""
        self.completion_tokens += len(samples)
        ids, finish = [sample.token_id for sample in samples], samples[-1].finish
        if finish is None:
            return self._detokenizer.push_all(ids)
        self.finish = finish.value
        if finish is FinishReason.STOP and ids[-1] in self._stop_ids:
            ids.pop()
        return self._detokenizer.push_all(ids) + self._detokenizer.finish()

    def _add(self, sample: Sample, out: list[str]) -> None:
        if sample.logprobs is not None:
            shown = self._text.texts.text_and_bytes(sample.token_id)
            top = tuple((*self._text.texts.text_and_bytes(i), p) for i, p in sample.logprobs.top)
            self._waiting.append(TokenText(*shown, sample.logprobs.logprob, self._seen_chars, top))
        fresh = self._detokenizer.push(sample.token_id)
        self._seen_chars += len(fresh)
        out.append(fresh if self._stops is None else self._stops.push(fresh))

    def _end(self, finish: str, out: list[str]) -> None:
        rest = self._detokenizer.finish()
        self._seen_chars += len(rest)
        self.finish = finish
        if self._stops is None:
            out.append(rest)
            return
        out.append(self._stops.push(rest))
        if self._stops.matched is None:
            out.append(self._stops.finish())
        else:
            self.finish, self.matched_stop = "stop", True

    def _shown_tokens(self) -> tuple[TokenText, ...]:
        """Tokens whose text has begun to show; at an end without a stop string, all."""
        everything = self.finish is not None and not self.matched_stop
        shown = []
        while self._waiting and (everything or self._waiting[0].offset < self._shown_chars):
            shown.append(self._waiting.popleft())
        return tuple(shown)
