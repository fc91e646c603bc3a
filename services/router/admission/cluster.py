"""What the gate asks the view: is there room, and does a request fit anybody at all."""

from collections.abc import Iterator
from itertools import zip_longest

from services.router.admission.base import Ask
from services.router.admission.room import Ahead, Room, look
from services.router.schedule.base import Policy, RouteRequest, WorkerFacts
from services.router.schedule.few import FEW
from services.router.schedule.filters import usable_decoders
from services.router.schedule.limits import fits, too_long
from services.router.view.view import View
from twinflow.contracts.workers import Role


class Cluster:
    def __init__(self, view: View, model: str, policy: Policy, worker_queue_s: float) -> None:
        """`worker_queue_s`: of prompts that may wait at a worker."""
        self._view = view
        self._model = model
        self._policy = policy
        self._worker_queue_s = worker_queue_s
        self._probe = self._request(1, 1)

    def look(self, ahead: Ahead) -> Room:
        return look(self._in_turn(), self._view.fleet, self._probe, self._policy, self._worker_queue_s, ahead)

    def check_fits(self, ask: Ask) -> None:
        """Raises NoDecodeWorker when nobody could take it, TooLong when no worker could ever hold it."""
        request = self._request(*ask.longest)
        records = [w.record for w in usable_decoders(self._view.snapshot(), request, self._policy)]
        if not any(fits(record, request) for record in records):
            raise too_long(records, request.prompt_tokens, request.max_tokens)

    def _in_turn(self) -> Iterator[WorkerFacts]:
        """One of each role, then the next ones: where there is plenty of room, the first few tell. Of a handful it takes longer
        to go in turn than to look at all."""
        if len(self._view) <= FEW:
            return self._view.each()
        in_turn = zip_longest(*(self._view.each(role) for role in Role))
        return (facts for each in in_turn for facts in each if facts is not None)

    def _request(self, prompt_tokens: int, max_tokens: int) -> RouteRequest:
        return RouteRequest(model=self._model, prompt_tokens=prompt_tokens, max_tokens=max_tokens, tie_seed=0)
