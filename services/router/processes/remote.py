"""Gate and placer as an HTTP process has them: every call is a message to the owner."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from services.router.admission.base import Ask, Permit
from services.router.dispatch.base import WorkerLost
from services.router.placing.base import Ended, TooLate, Want
from services.router.processes.line import Line
from services.router.processes.messages import Answer, Begun, Enter, Failed, Gone, Granted, Least, Leave, Withdrawn
from services.router.schedule.base import Choice
from services.router.view.prompt import PromptKeys
from twinflow.contracts.workers import WorkerRecord


class Owner:
    """Questions under way. `answered` and `lost` are told by whoever reads the line."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._gone = False

    def tell(self, message: object) -> None:
        self._line.send(0, message)

    async def ask(self, message: object, withdraw: Callable[[int], object] | None = None) -> Any:
        """Raises what the owner raises, and WorkerLost when it is gone. `withdraw` makes the message that takes the question
        back if nobody waits for its answer any more."""
        if self._gone:
            raise _lost()
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._line.send(number, message)
        try:
            found = await answer
        except asyncio.CancelledError:
            if withdraw is not None:
                self.tell(withdraw(number))
            raise
        finally:
            self._asked.pop(number, None)
        if isinstance(found, Failed):
            raise found.error
        return found

    def answered(self, number: int, answer: Answer) -> None:
        waiting = self._asked.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def lost(self) -> None:
        self._gone = True
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_result(Failed(_lost()))


def _lost() -> WorkerLost:
    return WorkerLost("the router's main process is gone")


class RemoteGate:
    """See `admission.base.Gate`; the owner itself tells its gate what was placed. `waiting` is that of the last answer."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.idle = True
        self.waiting = 0

    async def enter(self, ask: Ask) -> Permit:
        granted: Granted = await self._owner.ask(Enter(ask), withdraw=Withdrawn)
        self.idle, self.waiting = granted.idle, granted.waiting
        return granted.permit

    def placed(self, permit_id: int) -> None:
        pass

    def leave(self, permit_id: int, tokens: int) -> None:
        self._owner.tell(Leave(permit_id, tokens))


class RemotePlacer:
    """See `placing.base.Placer`. Prompts are hashed here, for the layouts of all workers, since that is most of the work."""

    def __init__(self, owner: Owner, workers: Callable[[], Iterable[WorkerRecord]]) -> None:
        self._owner = owner
        self._workers = workers

    async def place(self, want: Want) -> Choice | TooLate:
        self._hash(want.prompt)
        found: Choice | TooLate = await self._owner.ask(want, withdraw=lambda _: Gone(want.id))
        return found

    async def least_ttft_s(self, prompt: PromptKeys, max_tokens: int) -> float:
        self._hash(prompt)
        return float(await self._owner.ask(Least(prompt, max_tokens)))

    def begun(self, id: str) -> None:
        self._owner.tell(Begun(id))

    def ended(self, end: Ended) -> None:
        self._owner.tell(end)

    def _hash(self, prompt: PromptKeys) -> None:
        for record in self._workers():
            if record.block_tokens:
                prompt.block_hashes(record)
