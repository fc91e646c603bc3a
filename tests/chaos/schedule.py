"""What goes wrong and when: a list of faults that a seed decides. Pure."""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.StrEnum):
    KILL = "kill"  # SIGKILL to front and engine; started again after `lasts_s`
    PAUSE = "pause"  # SIGSTOP to front and engine, SIGCONT after `lasts_s`
    FREEZE = "freeze"  # SIGSTOP to the engine alone, its front goes on; SIGCONT after `lasts_s`
    STALL = "stall"  # a link takes bytes and delivers none, as behind a switch that is gone
    CUT = "cut"  # a link's connections are reset, new ones too
    SLOW = "slow"  # a worker's network cable carries 4 Mbit/s: reads of a prompt take seconds, nobody is lost
    UNPLUG = "unplug"  # a worker's network cable is out: sessions and READs stop, nothing is reset


class Point(enum.StrEnum):
    """Where in the life of a request: the fault waits for one in that phase, then `delay_s` more."""

    ANY = "any time"
    PREFILLING = "before the first token"
    DECODING = "amid an answer"
    READING = (
        "amid a read"  # faults of a prefill worker only: a decode worker has posted READs from some prefill worker
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """`victims`: one process, or the client and server of a link. `overlaps`: it does not wait until the requests that the
    fault before has hit go on. `rest_s`: before it, all the same."""

    kind: Kind
    victims: tuple[str, ...]
    point: Point
    delay_s: float
    lasts_s: float
    rest_s: float
    overlaps: bool = False

    @property
    def group(self) -> str:
        """The row of the table that it counts in: "kill decode", "stall router - prefill"."""
        return f"{self.kind} {' - '.join(name.split('-')[0] for name in self.victims)}"

    def __str__(self) -> str:
        return f"{self.kind} {' - '.join(self.victims)} for {self.lasts_s:.1f} s, {self.point}"


WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PROCESSES = ("prefill", "decode", "router")
LINKS = (("decode", "prefill"), ("router", "decode"), ("router", "prefill"))
DECK: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    *((kind, (role,)) for kind in (Kind.KILL, Kind.PAUSE) for role in PROCESSES),
    *((Kind.FREEZE, (role,)) for role in ("prefill", "decode")),
    *((kind, link) for kind in (Kind.STALL, Kind.CUT) for link in LINKS),
)
UNPLUGGED: tuple[tuple[Kind, tuple[str, ...]], ...] = ((Kind.UNPLUG, ("prefill",)), (Kind.UNPLUG, ("decode",)))
SLOWED: tuple[tuple[Kind, tuple[str, ...]], ...] = ((Kind.SLOW, ("prefill",)), (Kind.SLOW, ("decode",)))
OVERLAPPING = 0.2  # of the faults
LASTS_S = {
    Kind.KILL: (0.1, 2.0),
    Kind.PAUSE: (0.5, 9.0),
    Kind.FREEZE: (0.5, 6.0),
    Kind.STALL: (0.5, 6.0),
    Kind.CUT: (0.2, 4.0),
    Kind.SLOW: (1.0, 6.0),
    Kind.UNPLUG: (0.5, 6.0),
}


def schedule(
    seed: int,
    count: int,
    workers: Sequence[str] = WORKERS,
    deck: Sequence[tuple[Kind, tuple[str, ...]]] = DECK,
) -> list[Fault]:
    """`count` faults for a router and these workers. Every kind comes once before any comes again, so that no
    run leaves one out by chance."""
    rng = random.Random(seed)
    left: list[tuple[Kind, tuple[str, ...]]] = []
    faults = []
    for _ in range(count):
        if not left:
            left = rng.sample(list(deck), len(deck))
        kind, roles = left.pop()
        victims = tuple(rng.choice([n for n in ("router", *workers) if n.split("-")[0] == role]) for role in roles)
        faults.append(
            Fault(
                kind=kind,
                victims=victims,
                point=rng.choice(points(kind, roles)),
                delay_s=rng.uniform(0.0, 0.3),
                lasts_s=rng.uniform(*LASTS_S[kind]),
                rest_s=rng.uniform(0.1, 0.8),
                overlaps=rng.random() < OVERLAPPING,
            )
        )
    return faults


def points(kind: Kind, roles: tuple[str, ...]) -> list[Point]:
    """A read ends with the process that it reads from, or its cable, not with a session's link, and not when it is slow."""
    amid_read = roles == ("prefill",) and kind is not Kind.SLOW
    return [p for p in Point if p is not Point.READING or amid_read]
