"""The view: every known worker with its index, load and what this router has charged to it. One event loop owns it.

Loads reported by a worker are a step old. What the router itself has sent is charged at once and taken back when it is
known to be over (prefill: at the first token; request: at its end). A worker's load is the larger of both accounts, so
nothing is counted twice and a burst still spreads.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.router.schedule.base import Choice, ChoiceKind, Snapshot, WorkerFacts
from services.router.view.index import WorkerIndex
from services.router.view.prompt import PromptKeys
from twinflow.contracts.events import CacheEvent
from twinflow.contracts.workers import Load, Role, WorkerRecord

Key = tuple[str, str]  # worker id, incarnation


@dataclass(slots=True)
class _Worker:
    record: WorkerRecord
    connected: bool = False
    index: WorkerIndex = field(default_factory=WorkerIndex)
    prefill_charges: dict[str, int] = field(default_factory=dict)  # request → tokens still to prefill
    requests: set[str] = field(default_factory=set)

    def facts(self, prompt: PromptKeys | None) -> WorkerFacts:
        load = self.record.load
        hits = self.index.hits(self.record, prompt) if prompt is not None else ()
        return WorkerFacts(
            record=self.record,
            connected=self.connected,
            active_requests=max(load.running + load.waiting, len(self.requests)),
            queued_prefill_tokens=max(load.queued_prefill_tokens, sum(self.prefill_charges.values())),
            hits=hits,
            attention_tokens=hits[0].tokens if hits else 0,
        )


class View:
    def __init__(self) -> None:
        self._workers: dict[Key, _Worker] = {}

    # ---- facts come in ----

    def put(self, record: WorkerRecord) -> None:
        """From the registry. A new incarnation is a new worker with an empty index."""
        known = self._workers.get(record.key)
        if known is None:
            self._workers[record.key] = _Worker(record)
        else:
            load = known.record.load if known.connected else record.load  # the session's load is fresher
            known.record = dataclasses.replace(record, load=load)

    def remove(self, key: Key) -> None:
        self._workers.pop(key, None)

    def set_connected(self, key: Key, connected: bool) -> None:
        """A session that (re)starts begins with an empty index: events of the time between are unknown."""
        worker = self._workers.get(key)
        if worker is not None:
            worker.connected = connected
            worker.index = WorkerIndex()

    def is_connected(self, key: Key) -> bool:
        return key in self._workers and self._workers[key].connected

    def set_load(self, key: Key, load: Load) -> None:
        worker = self._workers.get(key)
        if worker is not None:
            worker.record = dataclasses.replace(worker.record, load=load)

    def apply(self, key: Key, events: Iterable[CacheEvent]) -> bool:
        """True: a gap has opened, ask the worker for a snapshot."""
        worker = self._workers.get(key)
        return worker is not None and worker.index.apply(events)

    def replace(self, key: Key, sequence: int, contents: Iterable[CacheEvent]) -> bool:
        """A snapshot arrived. True: events are still missing, ask again."""
        worker = self._workers.get(key)
        return worker is not None and worker.index.replace(sequence, contents)

    # ---- charges ----

    def charge(self, request_id: str, choice: Choice) -> None:
        """The decode worker runs one more; whoever prefills has that much more to compute."""
        decode = self._workers.get(choice.decode.key)
        if decode is not None:
            decode.requests.add(request_id)
        local = choice.kind is ChoiceKind.LOCAL
        prefill = decode if local else self._workers.get(choice.candidates[0].record.key)
        if prefill is not None:
            prefill.prefill_charges[request_id] = choice.prefill_tokens

    def prefilled(self, request_id: str) -> None:
        """Its first token came: nobody prefills for it any more."""
        for worker in self._workers.values():
            worker.prefill_charges.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        for worker in self._workers.values():
            worker.prefill_charges.pop(request_id, None)
            worker.requests.discard(request_id)

    # ---- facts go out ----

    def snapshot(self, prompt: PromptKeys | None = None) -> Snapshot:
        """All workers now; with `prompt`, its hits at those that could serve it."""
        return Snapshot(tuple(w.facts(prompt if w.connected else None) for w in self._workers.values()))

    def counts(self) -> dict[str, int]:
        """Connected workers by role."""
        counts = {role.value: 0 for role in Role}
        for worker in self._workers.values():
            counts[worker.record.role.value] += worker.connected
        return counts

    def index_entries(self) -> dict[str, int]:
        """Index entries by worker id."""
        return {w.record.id: len(w.index) for w in self._workers.values()}
