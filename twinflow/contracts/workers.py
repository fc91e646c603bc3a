"""Who serves: the record that a worker registers and the router schedules by."""

from dataclasses import field
from enum import Enum

from twinflow.contracts.facts import fact


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"  # aggregated: prefills and decodes in one worker

    __hash__ = object.__hash__  # Enum's own is a call in Python, and roles are looked up with every load


PREFILL, DECODE, BOTH = Role  # for who compares often: to get a member from its class takes as long as a call


@fact(frozen=True, slots=True)
class Pace:
    """What an engine has done since its start. Rates are differences of two of these; while anything runs it grows."""

    steps: int = 0
    busy_s: float = 0.0  # in which steps ran
    prefill_tokens: int = 0
    decode_tokens: int = 0


@fact(frozen=True, slots=True)
class Load:
    """A worker's load, as of its last step report. Two loads are equal if they differ in `pace` alone."""

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    free_blocks: int = 0  # free + cached-and-evictable
    total_blocks: int = 0
    free_slots: int = 0
    total_slots: int = 0
    pace: Pace = field(default_factory=Pace, compare=False)


@fact(frozen=True, slots=True)
class WorkerRecord:
    """`incarnation` is new at each start; leases, agents and descriptors are keyed by (id, incarnation, generation)."""

    id: str
    incarnation: str
    role: Role
    addresses: tuple[str, ...]  # host:port of the gRPC service, one per rank
    model: str  # served model name
    fingerprint: str
    max_model_tokens: int  # model's context limit
    max_request_tokens: int  # what the cache of this worker can hold for one request
    block_tokens: int
    draining: bool = False
    load: Load = field(default_factory=Load)
    block_bytes: int = 0  # of an attention block, 0 = unknown
    slot_bytes: int = 0  # of a state slot, 0 = unknown
    features: tuple[str, ...] = ()  # of requests that not every release takes: "grammar"

    @property
    def key(self) -> tuple[str, str]:
        return (self.id, self.incarnation)

    def with_load(self, load: Load) -> "WorkerRecord":
        """As `dataclasses.replace`, which takes several times as long; loads change with every step."""
        r = self
        return WorkerRecord(
            r.id, r.incarnation, r.role, r.addresses, r.model, r.fingerprint, r.max_model_tokens, r.max_request_tokens,
            r.block_tokens, r.draining, load, r.block_bytes, r.slot_bytes, r.features,
        )  # fmt: skip
