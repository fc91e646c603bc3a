"""The queue in front of the workers: deficit round robin on tokens between keys, priorities within a key. Pure.

Keys take turns. A turn brings a key `QUANTUM_TOKENS` × its weight; it sends requests as long as what it has saved covers the next
one. So keys that wait get tokens in proportion to their weights, however many requests they send and however long those are: over
any time in which two of them wait, what each got per weight differs by at most a quantum and their longest requests. A key that
has nothing left to send loses what it saved, so nobody gathers a claim by being idle.

Within a key a step of priority is worth `priority_s` seconds of waiting. So an important request overtakes, and a humble one is
overtaken for a bounded time only. Priorities do not reach into other keys' shares.
"""

import bisect
import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

QUANTUM_TOKENS = 2048


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One request that waits. `order`: seconds at which it came, less what its priority is worth."""

    key: str
    tokens: int
    order: float
    number: int
    what: T

    @property
    def rank(self) -> tuple[float, int]:
        return (self.order, self.number)


@dataclass(slots=True)
class _Flow(Generic[T]):
    """One key with requests that wait, in the order in which they go."""

    weight: float
    entries: list[Entry[T]] = field(default_factory=list)
    tokens: int = 0  # of all entries
    saved: float = 0.0


class FairQueue(Generic[T]):
    def __init__(self, priority_s: float) -> None:
        self._priority_s = priority_s
        self._flows: dict[str, _Flow[T]] = {}  # in the order of their turns
        self._in_turn: str | None = None  # whose turn it is
        self._entries = 0
        self._number = 0

    def __len__(self) -> int:
        return self._entries

    @property
    def tokens(self) -> int:
        return sum(flow.tokens for flow in self._flows.values())

    def push(self, key: str, weight: float, tokens: int, priority: int, now_s: float, what: T) -> Entry[T]:
        self._number += 1
        entry = Entry(key, max(1, tokens), now_s - priority * self._priority_s, self._number, what)
        flow = self._flows.setdefault(key, _Flow(weight))
        flow.weight = weight
        bisect.insort(flow.entries, entry, key=lambda e: e.rank)
        flow.tokens += entry.tokens
        self._entries += 1
        return entry

    def pop(self) -> Entry[T]:
        """The next to go. Raises IndexError when nobody waits."""
        if not self._flows:
            raise IndexError("the queue is empty")
        while True:
            key = self._in_turn
            if key is not None:
                flow = self._flows[key]
                if flow.saved >= flow.entries[0].tokens:
                    entry = flow.entries[0]
                    flow.saved -= entry.tokens
                    self.remove(entry)
                    return entry
                self._flows[key] = self._flows.pop(key)  # to the end
            self._skip_vain_rounds()
            self._in_turn = next(iter(self._flows))
            self._flows[self._in_turn].saved += self._quantum(self._flows[self._in_turn])

    def remove(self, entry: Entry[T]) -> bool:
        """It goes, or its client has left. False: it is not here any more."""
        flow = self._flows.get(entry.key)
        at = bisect.bisect_left(flow.entries, entry.rank, key=lambda e: e.rank) if flow is not None else 0
        if flow is None or at == len(flow.entries) or flow.entries[at] is not entry:
            return False
        del flow.entries[at]
        flow.tokens -= entry.tokens
        self._entries -= 1
        if not flow.entries:
            del self._flows[entry.key]
            if self._in_turn == entry.key:
                self._in_turn = None
        return True

    def used_less(self, key: str, tokens: float) -> None:
        """One that went has not used so much of what it was counted with. A key that still waits has it saved."""
        flow = self._flows.get(key)
        if flow is not None:
            flow.saved += tokens

    def worst(self) -> Entry[T]:
        """Who has to go when there are too many: the last one of the key that has most waiting per weight. Not empty."""
        flow = max(self._flows.values(), key=lambda f: f.tokens / f.weight)
        return flow.entries[-1]

    def ahead_tokens(self, entry: Entry[T]) -> float:
        """How many tokens go until this one has gone, itself included, as long as the same keys wait."""
        flow = self._flows[entry.key]
        own = sum(e.tokens for e in flow.entries[: flow.entries.index(entry) + 1])
        turns = own / flow.weight
        others = (f for key, f in self._flows.items() if key != entry.key)
        return own + sum(min(f.tokens, turns * f.weight) for f in others)

    def _quantum(self, flow: _Flow[T]) -> float:
        return QUANTUM_TOKENS * flow.weight

    def _skip_vain_rounds(self) -> None:
        """Rounds in which nobody could send change nothing but what all have saved: they are added at once."""
        flows = self._flows.values()
        rounds = min(math.ceil((f.entries[0].tokens - f.saved) / self._quantum(f)) for f in flows) - 1
        if rounds > 0:
            for flow in flows:
                flow.saved += rounds * self._quantum(flow)
