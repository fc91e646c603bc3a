"""Whether a request goes on after an attempt has failed, and without whom.

Before its first token it is simply tried elsewhere. After it, it is moved: the next worker gets the tokens that the client has as
a forced prefix and draws the same next one, greedy or not, since sampling depends on seed and position alone, and the place in a
grammar on these tokens. Either way at most twice: a request that brings workers down must not walk through the cluster.
"""

from dataclasses import dataclass, field

from services.router.dispatch.base import Key, WorkerLost
from twinflow.contracts.errors import HandoffFailed, Internal, NoCapacity, TwinflowError

MAX_MOVES = 2


@dataclass(slots=True)
class Recovery:
    """Of one request."""

    moves: int = 0
    excluded: set[Key] = field(default_factory=set)
    _told: list[str] = field(default_factory=list)

    def failed(self, error: TwinflowError, decode: Key) -> None:
        """Returns if another attempt may be made, without the worker at fault. Raises what ends the request otherwise."""
        if not isinstance(error, HandoffFailed | Internal | NoCapacity):
            raise error
        culprit = error.culprit if isinstance(error, WorkerLost) else None
        self.excluded.add(culprit or decode)
        self._told.append((culprit or decode)[0])
        if self.moves == MAX_MOVES:
            if isinstance(error, NoCapacity):
                raise error
            tried = ", ".join(self._told)
            raise WorkerLost(f"given up after {MAX_MOVES + 1} workers failed it ({tried}); the last: {error.message}")
        self.moves += 1

    def stranded(self, failed: TwinflowError, nobody: TwinflowError) -> TwinflowError:
        """The error of a request for which there is no other worker."""
        if isinstance(failed, NoCapacity):
            return failed
        return WorkerLost(f"{failed.message}; it cannot be tried elsewhere: {nobody.message}")
