"""Questions to the engine that it answers by token, as awaitables of the front's loop."""

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

from twinflow.contracts.errors import DeadlineExceeded, TwinflowError
from twinflow.engine.base import Answer, Command

ANSWER_S = 10.0  # the engine answers within one turn; one step of a large model and a long chunk takes less than this

A = TypeVar("A", bound=Answer)


class Questions:
    """One per front, used from its loop."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._tokens = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._lost: TwinflowError | None = None

    async def ask(self, kind: type[A], make: Callable[[int], Command], wait_s: float = ANSWER_S) -> A:
        """Sends `make(token)` and waits for its answer. Raises DeadlineExceeded, or the error that the engine died of."""
        if self._lost is not None:
            raise self._lost
        token = next(self._tokens)
        future = self._waiting[token] = asyncio.get_running_loop().create_future()
        try:
            self._send(make(token))
            answer = await asyncio.wait_for(future, wait_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the engine did not answer within {wait_s:g} s") from None
        finally:
            del self._waiting[token]
        assert isinstance(answer, kind)
        return answer

    def answered(self, answer: Answer) -> None:
        """Nobody may be waiting any more."""
        future = self._waiting.get(answer.token)
        if future is not None and not future.done():
            future.set_result(answer)

    def lost(self, error: TwinflowError) -> None:
        """The engine is gone: everybody who waits, or asks later, gets this error."""
        self._lost = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
