"""Pairs of workers that fail each other: one that has failed three times in a row is left alone for a while, then tried once.

A fault is a hand-off or an engine that broke. A worker that is full, draining or busy said so in good health: back-pressure
never counts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from twinflow.contracts.errors import HandoffFailed, Incompatible, Internal, TwinflowError

FAULTS = 3  # in a row
OPEN_S = 10.0

Pair = tuple[str, str]  # worker ids (prefill, decode); ("", decode) = the worker by itself

NONE: frozenset[Pair] = frozenset()


@dataclass(slots=True)
class _State:
    faults: int = 0
    open_until_s: float = 0.0


class Breakers:
    """Bounded by the pairs of workers that there are; those without a fault take no memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[Pair, _State] = {}

    def failed(self, pair: Pair) -> None:
        state = self._states.setdefault(pair, _State())
        state.faults += 1
        if state.faults >= FAULTS:
            state.open_until_s = self._clock() + OPEN_S

    def worked(self, pair: Pair) -> None:
        self._states.pop(pair, None)

    def forget(self, worker_id: str) -> None:
        """The worker has left; its next incarnation starts anew."""
        self._states = {p: s for p, s in self._states.items() if worker_id not in p}

    def open(self) -> frozenset[Pair]:
        """Pairs not to be used now. Once a pair's time is over it is usable; its next fault opens it again at once."""
        if not self._states:
            return NONE
        now = self._clock()
        return frozenset(p for p, s in self._states.items() if s.open_until_s > now)


def is_fault(error: TwinflowError) -> bool:
    """Of the worker that said so, not of the request or of a shortage."""
    return isinstance(error, Internal | HandoffFailed) and not isinstance(error, Incompatible)
