"""The contract of every registry backend: a table of worker records and a feed of its changes.

Router side: `Registry` for whoever reads it, `HostedRegistry` for the process that runs it. Worker side: `Registration`.
`factory` chooses the backend.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from grpc import aio

from twinflow.contracts.workers import WorkerRecord


class ChangeKind(Enum):
    JOINED = "joined"
    UPDATED = "updated"  # same incarnation; load, draining or addresses differ
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Change:
    """For LEFT, `record` is the last one known. A restart (new incarnation) is LEFT then JOINED."""

    kind: ChangeKind
    record: WorkerRecord


class Registry(Protocol):
    def records(self) -> Mapping[str, WorkerRecord]:
        """Live workers by id, now. No side effects; a copy that the caller may keep."""
        ...

    def watch(self) -> AsyncIterator[Change]:
        """Every live worker as JOINED, then changes in order, for ever. Each watcher sees everything."""
        ...


class HostedRegistry(Registry, Protocol):
    """A registry as the router's process runs it."""

    @property
    def up(self) -> bool:
        """False while the backend does not answer: known workers stay, new ones cannot be seen."""
        ...

    def add_to(self, server: aio.Server) -> None:
        """Adds what workers dial, if they dial the router; call before the server starts."""
        ...

    async def run(self) -> None:
        """Keeps the table current until cancelled, whatever happens to the backend; then lets go of it."""
        ...


class Registration(Protocol):
    """One worker, kept registered while `run` runs."""

    @property
    def registered(self) -> bool:
        """True while the last heartbeat got through (somewhere)."""
        ...

    def announce(self) -> None:
        """Sends the record now instead of at the next beat, e.g. when draining starts."""
        ...

    async def run(self) -> None:
        """Until cancelled, which deregisters. A backend that is away is retried for ever; every change is logged."""
        ...


def record_problem(record: WorkerRecord) -> str:
    """Why a record cannot be registered; empty if it can."""
    complete = record.id and record.incarnation and record.addresses and all(record.addresses)
    return "" if complete else "a worker record needs id, incarnation and addresses"
