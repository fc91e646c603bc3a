"""One request between its worker's session (puts, never waits) and its client (takes, as fast as it likes)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from services.router.dispatch.base import Key, SlowClient, Untold
from twinflow.contracts.errors import TwinflowError
from twinflow.contracts.facts import fact
from twinflow.contracts.requests import RequestStats, Sample

log = logging.getLogger(__name__)

BUFFER_TOKENS = 4096


@fact(frozen=True, slots=True)
class Batch:
    """Everything that had come in at one moment; `last` when the worker is done with the request."""

    samples: tuple[Sample, ...]
    last: bool


class RequestStream:
    """Made by `WorkerLink.submit`. The taker must `close` it; closing an unfinished one cancels upstream."""

    def __init__(
        self,
        id: str,
        cancel_upstream: Callable[[], None],
        forget: Callable[[], None],
        limit_tokens: int,
        prefill: Key | None = None,
    ) -> None:
        """`prefill`: the worker that is expected to compute the prompt, if it is another one."""
        self.id = id
        self.prefill = prefill
        self.begun = False  # a token came
        self.went_on = False  # another one did: what the decode worker needs of a prefill worker it has
        self._cancel_upstream = cancel_upstream
        self._forget = forget
        self._limit_tokens = limit_tokens
        self._samples: list[Sample] = []
        self._error: TwinflowError | None = None
        self._over = False  # nothing more comes from the worker
        self._cancelled = False
        self.overflowed = False  # the client was too slow
        self.stats: RequestStats | None = None  # once the worker has told them
        self._news = False  # something came that was not taken
        self._waiter: asyncio.Future[None] | None = None  # whoever takes waits for it
        self._rest = False  # whoever takes wants all that is still to come at once
        self.shortcut: Callable[[int], bool] | None = None  # see `put_token`
        self._short: Callable[[int], bool] | None = None  # the same, while whoever takes has taken everything and waits
        self.on_begun: Callable[[], None] | None = None  # called with the first token, before anybody can take it

    def put_token(self, token_id: int) -> None:
        """As `put` of one token that ends nothing and has no logprobs. After the first one, while the taker waits with nothing
        to take, it is offered to `shortcut` first, which may take it in its stead (True). What that raises ends this request,
        whose text is then unknown, and no other."""
        short = self._short
        if short is not None:
            self.went_on = True
            try:
                if short(token_id):
                    return
            except Exception:  # process edge: the worker's session is everybody's
                log.exception("the text of request %s could not be given on", self.id)
                self.cancel()
                self.fail(Untold("internal error; the router's log has the details"))
                return
        if self._rest and self.begun and not self._over:  # nobody is to be woken
            self.went_on = True
            self._samples.append(Sample(token_id))
        else:
            self.put((Sample(token_id),))

    def put(self, samples: Sequence[Sample]) -> None:
        """More buffered tokens than the limit: the client is too slow, the request is cancelled."""
        if self._over:
            return
        if samples:
            self.went_on = self.begun or len(samples) > 1
        if samples and not self.begun:
            self.begun = True
            if self.on_begun is not None:
                self.on_begun()
        self._samples.extend(samples)
        if samples and samples[-1].finish is not None:
            self._end()
        elif self._rest:
            return
        elif len(self._samples) > self._limit_tokens:
            self.overflowed = True
            self.cancel()
            self.fail(SlowClient(f"cancelled: the client left more than {self._limit_tokens} tokens unread"))
        self._wake()

    def fail(self, error: TwinflowError) -> None:
        """What is buffered is still taken first, then the error is raised."""
        if not self._over:
            self._error = error
            self._end()
            self._wake()

    def _wake(self) -> None:
        self._short = None
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> Batch:
        """Waits for news, takes all of it. Raises the request's error once the buffer is empty."""
        if not self._news:
            if self.begun:  # which it cannot become without waking whoever waits
                self._short = self.shortcut
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._short = self._waiter = None
        self._news = False
        if not self._samples and self._error is not None:
            raise self._error
        samples, self._samples = tuple(self._samples), []
        if self._error is not None:
            self._news = True  # raised by the next call
        return Batch(samples, self._over and self._error is None)

    def take_rest(self) -> Awaitable[Batch]:
        """As `take`, once for all tokens to the end or to an error: nobody waits for a part of them, and there is no limit."""
        self._rest = True
        if not self._over:
            self._news = False
        return self.take()

    def cancel(self) -> None:
        """Tells the worker at once; it still answers with a last output and its stats."""
        if not self._over and not self._cancelled:
            self._cancelled = True
            self._cancel_upstream()

    def close(self) -> None:
        self.cancel()
        self._over = True
        self._forget()

    def _end(self) -> None:
        self._over = True
        self._forget()
