"""What a hand-off moves in what time, what a client waits for meanwhile, and a plain copy to hold it against.

Both workers are whole processes; this side speaks to the decode worker as a router does and names the prefill worker as its
only candidate. So all of it is in the figures: sessions, fronts, engines, transport.
"""

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch

from twinflow.bench.client import Worker
from twinflow.contracts.errors import Internal
from twinflow.engine.base import CONFIRM_S, DESCRIPTORS, EARLY_BYTES, POST_S, PULLS, STEP_S, TAIL_S

COPIES = 10
PAUSE_S = 0.02
IDS = 64  # every vocabulary has so many
STEPS = 16  # tokens behind the second one, whose gaps are steps of the decode worker


@dataclass(frozen=True, slots=True)
class Shot:
    """One hand-off. `read_s`: with a read out; `tail_s`: from the end of the prompt until all was read; `gap_s`: between the
    first and the second token; `step_s`: of the decode worker, behind the same context. `pulls`: reads that were asked for one
    after the other. `parts`: where `gap_s` goes, in order (`parts_of`)."""

    bytes: int
    blocks: int
    slots: int
    read_s: float
    early_bytes: int
    tail_s: float
    gap_s: float
    step_s: float
    first_s: float
    descriptors: int
    transport: str
    pulls: int = 1
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.read_s


@dataclass(slots=True)
class Shooter:
    """Hand-offs one at a time, each waited for."""

    prefill: Worker
    decode: Worker
    within_s: float
    seed: int = 0

    def fresh(self, tokens: int) -> np.ndarray:
        """A prompt that nobody has seen."""
        self.seed += 1
        return np.random.default_rng(self.seed).integers(0, IDS, tokens)

    async def shoot(self, prompt: np.ndarray) -> Shot:
        """Raises Internal unless it went through a hand-off that moved something."""
        began = time.monotonic()
        answer = await self.decode.generate(prompt, self.prefill, STEPS + 2, self.within_s)
        stats, marks = answer.stats, answer.marks
        if stats.route != "remote" or not stats.bytes_moved:
            raise Internal(f"a request went {stats.route or 'nowhere'} ({stats.reason}): nothing was moved")
        gaps = [b - a for a, b in itertools.pairwise(marks)]
        return Shot(
            bytes=stats.bytes_moved,
            blocks=stats.blocks_moved,
            slots=stats.slots_moved,
            read_s=stats.transfer_s,
            early_bytes=int(stats.extra.get(EARLY_BYTES, 0)),
            tail_s=float(stats.extra.get(TAIL_S, 0.0)),
            gap_s=gaps[0],
            step_s=median(gaps[1:]),
            first_s=marks[0] - began,
            descriptors=int(stats.extra.get(DESCRIPTORS, 0)),
            transport=stats.transport,
            pulls=int(stats.extra.get(PULLS, 0)),
            parts=parts_of(stats.extra, gaps[0]),
        )


def parts_of(told: Mapping[str, float], gap_s: float) -> dict[str, float]:
    """Seconds from the end of the prompt, as the decode worker's engine is told it, to the second token, by what they went to:
    until the last READ was posted, until that was seen to be done, until it was confirmed, until the token was drawn. `messages`:
    what else the client waited between its two tokens (the end of the prompt follows the first token, the second one has to
    come)."""
    tail_s, post_s = told.get(TAIL_S, 0.0), told.get(POST_S, 0.0)
    parts = {
        "post": post_s,
        "read": tail_s - post_s,
        "confirm": told.get(CONFIRM_S, 0.0),
        "step": told.get(STEP_S, 0.0),
    }
    return parts | {"messages": gap_s - sum(parts.values())}


@dataclass(frozen=True, slots=True)
class PlainCopy:
    """Seconds of a copy of as many bytes between the same devices. `alone_s`: one, from telling the device until the host has
    seen its end, behind a pause like that between two hand-offs; what a read can be held against. `in_row_s`: each of many told
    at once, which is the rate of the link."""

    alone_s: float
    in_row_s: float


def plain_copy(size_bytes: int, source: str, target: str) -> PlainCopy:
    """Of those alone the median, of the rows the best."""
    a = torch.empty(size_bytes, dtype=torch.uint8, device=source).fill_(1)
    b = torch.empty(size_bytes, dtype=torch.uint8, device=target).fill_(0)

    def seconds(copies: int) -> float:
        for device in {source, target} - {"cpu"}:
            torch.cuda.synchronize(device)
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        for _ in range(copies):
            b.copy_(a, non_blocking=True)
        for device in {source, target} - {"cpu"}:
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    seconds(1)  # the devices have met
    alone_s = median(seconds(1) for _ in range(COPIES))
    return PlainCopy(alone_s, min(seconds(COPIES) for _ in range(COPIES)) / COPIES)
