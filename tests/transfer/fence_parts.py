"""What the model of the fence is made of: sizes, the bytes of the prompt, the prefill worker, and one attempt of its reader."""

from collections.abc import Iterable
from dataclasses import dataclass

from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.base import Holding
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec, TensorSpec
from twinflow.transfer import intake
from twinflow.transfer.base import PeerArena, TransferError
from twinflow.transfer.intake import Intake
from twinflow.transfer.leases import Ended, LeaseTable
from twinflow.transfer.loopback import LoopbackNetwork, LoopbackTransport, PostedRead

LAYOUT = CacheLayout(
    "model",
    (
        GroupSpec(
            "attention", GroupKind.ATTENTION, (0,), (TensorSpec("k", (1,), "float32"), TensorSpec("v", (1,), "float32")), 1
        ),
        GroupSpec("state", GroupKind.STATE, (1,), (TensorSpec("temporal", (2,), "float32"),)),
    ),
)  # fmt: skip
FINGERPRINT = LAYOUT.fingerprint()
UNIT = 8  # bytes of a block and of a slot
TOKENS = 2  # of the prompt: two blocks of one token
GEOMETRY = ArenaGeometry(total_bytes=8 * UNIT, block_bytes=UNIT, slot_bytes=UNIT, blocks=4, slots=4)
WANTED = 1  # the checkpoint that is asked for besides
BLOCKS, SLOT, CHECKPOINT = (1, 2), 1, 2  # at the prefill worker
ATTEMPTS = 2
FAULTS = {"D cancels", "D loses", "P loses", "P ends", "P restarts", "D renews", "P renews"}
OTHER = b"\xaa" * UNIT  # of the next owner of memory at the decode worker
LATER = b"\x99" * UNIT  # of the next owner at the prefill worker


class Violation(Exception):
    pass


class Clock:
    """Stands still unless told: bounds on time are events of the search."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Nothing:
    """No copies happen here."""

    def copy_slot(self, source: int, target: int) -> None:
        raise AssertionError("unexpected copy")

    copy_block = copy_slot


def right(what: str, index: int) -> bytes:
    """The bytes of the prompt's block or state."""
    return bytes([{"block": 1, "slot": 16}[what] + index]) * UNIT


def places(blocks: Iterable[int], slots: Iterable[int | None]) -> list[int]:
    """Offsets in the decode worker's memory."""
    at = [GEOMETRY.block_offset(b) for b in blocks]
    return at + [GEOMETRY.slot_offset(s) for s in slots if s is not None]


def expect(memory: bytearray, where: list[int], want: list[bytes], what: str) -> None:
    for at, data in zip(where, want, strict=True):
        if (got := bytes(memory[at : at + UNIT])) != data:
            raise Violation(f"{what} at {at} are {got!r}, not {data!r}")


def add_up(cache: HybridCache, *, quiet: bool = False) -> None:
    """`quiet`: nothing is anybody's."""
    cache.check_integrity()
    for name, c in cache.counts().items():
        if c.free + c.cached + c.held + c.doomed != c.total:
            raise Violation(f"{name}: {c}")
        if quiet and (c.held or c.doomed or c.pinned_by_io):
            raise Violation(f"{name} at the end: {c}")


def would_change_nothing(read: PostedRead, network: LoopbackNetwork, memory: bytearray) -> bool:
    """Whether all its bytes are here as they are there now."""
    try:
        there = network.memory(read.agent_name)
    except TransferError:
        return False
    spans = [(r.remote_offset, r.local_offset, r.length) for r in read.ranges]
    return all(there[far : far + size] == memory[near : near + size] for far, near, size in spans)


@dataclass(frozen=True)
class Message:
    """Of the session `epoch`. `pulled` carries what was read, and from where."""

    epoch: int
    kind: str
    lease: str
    arena: PeerArena | None = None
    said: intake.SayPulled | None = None


class Prefill:
    """One process at one address; `restart` makes it the next incarnation."""

    def __init__(self, network: LoopbackNetwork) -> None:
        self.network = network
        self.incarnation = 0
        self.memory = bytearray()
        self.agents: dict[int, LoopbackTransport] = {}
        self.start()

    def start(self) -> None:
        for agent in self.agents.values():
            agent.close()
        self.incarnation += 1
        self.memory = bytearray(LATER * (GEOMETRY.total_bytes // UNIT))
        self.generation = 1
        self.agents = {1: self._agent(1)}
        self.leases = LeaseTable(str(self.incarnation), 1)
        self.lease = ""
        self.progress = 0  # 1 = announced, 2 = finished
        self.connected = 0  # epoch of the session, 0 = none
        self.free = True  # nothing leased: whatever is there may be overwritten

    def _agent(self, generation: int) -> LoopbackTransport:
        return LoopbackTransport(self.network, f"p/{self.incarnation}/{generation}", self.memory)

    def arena(self) -> PeerArena:
        g, name = GEOMETRY, f"p/{self.incarnation}/{self.generation}"
        return PeerArena(
            "p", str(self.incarnation), self.generation, 0, g.total_bytes, UNIT, UNIT, g.blocks, g.slots, "DRAM", 0, name,
            name.encode(),
        )  # fmt: skip

    def write(self, what: str, unit: int, data: bytes) -> None:
        at = GEOMETRY.block_offset(unit) if what == "block" else GEOMETRY.slot_offset(unit)
        self.memory[at : at + UNIT] = data

    @property
    def state(self) -> object:
        return (
            bytes(self.memory), self.incarnation, self.generation, tuple(self.agents), self.lease, self.progress,
            self.connected, self.free,
        )  # fmt: skip

    @property
    def stale(self) -> bool:
        """Nobody's, and the last owner's bytes are still there."""
        return self.free and any(self.memory[i : i + UNIT] != LATER for i in range(0, len(self.memory), UNIT))

    def reuse(self) -> None:
        self.memory[:] = LATER * (len(self.memory) // UNIT)

    def ended(self, over: list[Ended]) -> None:
        if any(e.lease_id == self.lease for e in over):
            self.free, self.lease = True, ""

    def renew(self) -> None:
        self.generation += 1
        self.agents[self.generation] = self._agent(self.generation)
        self.leases.open_generation(self.generation)

    def close_old(self) -> None:
        old = min(self.agents)
        self.agents.pop(old).close()
        self.ended(self.leases.close_generation(old))


@dataclass
class Attempt:
    """One hand-off as the decode side sees it."""

    intake: Intake
    epoch: int
    arena: PeerArena
    lease: str
    holding: Holding
    over: bool = False
    used: bool = False  # confirmed and adopted
    kept: int | None = None  # local slot of the checkpoint
