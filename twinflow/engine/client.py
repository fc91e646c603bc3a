"""The front's end of the engine: a pipe to the engine process, or (in tests) a queue to an engine thread."""

from collections.abc import AsyncIterator
from typing import Protocol

from twinflow.engine.base import Command, Ready, Report
from twinflow.engine.config import EngineConfig


class EngineClient(Protocol):
    """Used from one asyncio loop."""

    async def start(self, config: EngineConfig) -> Ready:
        """Starts the engine and waits until it is loaded and warm. Raises ModelError with the engine's own message."""
        ...

    def send(self, command: Command) -> None:
        """Queues a command; never blocks. Ignored once the engine is gone."""
        ...

    def reports(self) -> AsyncIterator[Report]:
        """All reports in order; ends when the engine has shut down, raises Internal when it died. One reader."""
        ...

    @property
    def unheard_s(self) -> float:
        """For how long the engine's process has said nothing at all, not even that it runs; 0 before it is ready."""
        ...

    async def close(self) -> None:
        """Shutdown, wait, then kill after a grace. Idempotent."""
        ...
