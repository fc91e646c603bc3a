"""What one key has used of its limits. Pure; the time is passed in."""

from dataclasses import dataclass, field

from services.router.admission.base import NO_QUOTAS, Ask, KeyFacts, Quotas, Refusal, Shed, ShedReason
from services.router.admission.buckets import Bucket
from twinflow.contracts.errors import BadRequest, TooLong


@dataclass(slots=True)
class KeyState:
    """All limits of a key are charged together or none is.

    Tokens are those of the whole prompt, cached or not, since a limit that depended on what happens to be cached could not be
    relied on, and the most that the replies may have. What is not used comes back when the request ends.
    """

    key: KeyFacts
    now_s: float
    active: int = 0  # generations
    _requests: Bucket | None = field(init=False, default=None)
    _tokens: Bucket | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._requests = _resized(None, self.key.requests_per_min, self.now_s)
        self._tokens = _resized(None, self.key.tokens_per_min, self.now_s)

    def follow(self, key: KeyFacts, now_s: float) -> None:
        """Its limits may have changed."""
        if key is not self.key and key != self.key:
            self.key = key
            self._requests = _resized(self._requests, key.requests_per_min, now_s)
            self._tokens = _resized(self._tokens, key.tokens_per_min, now_s)

    def charge(self, ask: Ask, now_s: float, retry_after_s: float) -> None:
        """Raises Shed, without charging anything, or the error for what is over a limit by itself. `retry_after_s` is told where
        nothing better is known."""
        self._check(ask)
        requests_s = self._requests.wait_s(1, now_s) if self._requests is not None else 0.0
        tokens_s = self._tokens.wait_s(ask.tokens, now_s) if self._tokens is not None else 0.0
        if requests_s > 0 or tokens_s > 0:
            why = ShedReason.REQUESTS_PER_MIN if requests_s >= tokens_s else ShedReason.TOKENS_PER_MIN
            raise self._shed(ask, why, max(requests_s, tokens_s), now_s)
        limit = self.key.concurrent
        if limit is not None and self.active + ask.generations > limit:
            raise self._shed(ask, ShedReason.CONCURRENT, retry_after_s, now_s)
        self.active += ask.generations
        if self._requests is not None:
            self._requests.take(1, now_s)
        if self._tokens is not None:
            self._tokens.take(ask.tokens, now_s)

    def correct(self, ask: Ask, used_tokens: int, now_s: float) -> None:
        """The request has ended, or did not get in."""
        self.active -= ask.generations
        if self._tokens is not None:
            self._tokens.give_back(ask.tokens - used_tokens, now_s)

    def quotas(self, now_s: float) -> Quotas:
        if self._requests is None and self._tokens is None:
            return NO_QUOTAS
        return Quotas(
            None if self._requests is None else self._requests.quota(now_s),
            None if self._tokens is None else self._tokens.quota(now_s),
        )

    def is_fresh(self, now_s: float) -> bool:
        """Nothing is known of it that a new one would not say."""
        buckets = [b for b in (self._requests, self._tokens) if b is not None]
        return self.active == 0 and all(b.is_full(now_s) for b in buckets)

    def _check(self, ask: Ask) -> None:
        """What no waiting would help."""
        key = self.key
        if key.tokens_per_min is not None and ask.tokens > key.tokens_per_min:
            raise TooLong(
                f"prompt and reply may take {ask.tokens} tokens ({ask.prompt_tokens} and {ask.reply_tokens}), which is over the "
                f"{key.tokens_per_min} a minute of key {key.name}",
                param="max_tokens",
            )
        if key.concurrent is not None and ask.generations > key.concurrent:
            raise BadRequest(
                f"n: {ask.generations} choices at once, key {key.name} may have {key.concurrent}", param="n"
            )

    def _shed(self, ask: Ask, why: ShedReason, retry_after_s: float, now_s: float) -> Shed:
        key = self.key
        told = {
            ShedReason.REQUESTS_PER_MIN: f"key {key.name} may send {key.requests_per_min} requests a minute",
            ShedReason.TOKENS_PER_MIN: f"key {key.name} has {key.tokens_per_min} tokens a minute, not enough are left for "
            f"{ask.tokens} (prompt {ask.prompt_tokens}, reply at most {ask.reply_tokens})",
            ShedReason.CONCURRENT: f"key {key.name} may have {key.concurrent} generations at once, {self.active} run or wait",
        }[why]
        quotas = self.quotas(now_s)
        return Shed(Refusal(told, why, key.name, retry_after_s, quotas))


def _resized(bucket: Bucket | None, per_min: int | None, now_s: float) -> Bucket | None:
    if per_min is None:
        return None
    if bucket is None:
        return Bucket.full(per_min, now_s)
    bucket.resize(per_min, now_s)
    return bucket
