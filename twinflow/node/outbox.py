"""Messages waiting to be written to one gRPC stream. Puts never block; `stream` writes them, by iterating."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from twinflow.contracts.errors import Overloaded, TwinflowError

M = TypeVar("M")

LIMIT_MESSAGES = 8192  # at one message a step and 100 steps/s: a peer that has read nothing for over a minute


class Outbox(Generic[M]):
    """Used from one asyncio loop, iterated once. `error` says why it was closed, None for an ordinary end.

    A peer that does not read is not waited for: beyond `limit` messages the outbox drops them all and closes.
    """

    def __init__(self, limit: int = LIMIT_MESSAGES) -> None:
        self.error: TwinflowError | None = None
        self._limit = limit
        self._waiting: deque[M] = deque()
        self._reader: asyncio.Future[None] | None = None  # while it waits
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, message: M) -> None:
        """Queues a message; ignored once closed."""
        if self._closed:
            return
        if len(self._waiting) >= self._limit:
            self._waiting.clear()
            self.close(Overloaded(f"the peer left {self._limit} messages unread"))
            return
        self._waiting.append(message)
        self._wake()

    def close(self, error: TwinflowError | None = None) -> None:
        """Ends the iteration after what is already queued. Idempotent: the first error stays."""
        if not self._closed:
            self._closed, self.error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def __aiter__(self) -> AsyncIterator[M]:
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._closed:
                return
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
