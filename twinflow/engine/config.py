"""Settings of the engine process. The front reads them from its file and command line and hands them over at start."""

from dataclasses import dataclass

from twinflow.contracts.errors import BadRequest
from twinflow.contracts.workers import Role
from twinflow.node.settings import setting

CHOICES = {
    "transport": ("nixl", "none"),
    "verify": ("none", "checksum"),
    "require_rdma": ("auto", "on", "off"),
    "cuda_graphs": ("auto", "off"),
    "load_format": ("auto", "dummy"),
    "attention": ("auto", "cudnn", "flashinfer", "triton"),
}
POSITIVE = (
    "max_running",
    "block_tokens",
    "step_tokens",
    "chunk_tokens",
    "growth_tokens",
    "threads",
    "grammar_threads",
)
NOT_NEGATIVE = (
    "cache_bytes",
    "checkpoint_slots",
    "checkpoint_interval_tokens",
    "reserve_wait_s",
    "steps_in_flight",
    "doomed_limit_bytes",
    "doomed_limit_s",
    "generation_drain_s",
)
UTILISATION = 0.9  # what is left is the driver's, its contexts' and other processes'
DOOMED_SHARE = 8  # of the arena: so much less cache is felt, and a change of generation costs little against it


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bytes, tokens and seconds as the names say. Raises BadRequest, naming the setting, for values that cannot work."""

    model: str  # folder or hub id
    worker_id: str
    incarnation: str  # new at each start
    role: Role
    dtype: str = setting("auto", "of weights, KV and conv states: float32, bfloat16, float16; auto = as the model says")
    state_dtype: str = setting("float32", "of the recurrent (temporal) states; part of the layout's fingerprint")
    load_format: str = setting(
        "auto", "auto = the model's weights; dummy = random ones, from its config alone, to measure with"
    )
    device: str = setting("cpu", "cpu, cuda or cuda:N")
    cache_bytes: int = setting(
        0, "of the arena that holds attention blocks and state slots; 0 = what `utilisation` leaves, on CPU 256 MiB"
    )
    utilisation: float = setting(
        UTILISATION,
        "share of a GPU's memory for weights, workspace and arena; for nothing where cache_bytes is given, or on CPU",
    )
    max_running: int = setting(16, "requests that run at once, each with a state slot of its own")
    checkpoint_slots: int = setting(16, "state slots that checkpoints have at least; more where blocks leave room")
    checkpoint_interval_tokens: int = setting(0, "between states saved inside a prompt; 0 = from the model's sizes")
    prefix_cache: bool = setting(True, "false = no request finds what another left here: to measure what hits give")
    block_tokens: int = setting(64, "tokens of an attention block: the unit of hits and of transfer")
    step_tokens: int = setting(2048, "tokens of one step over all requests: larger is faster prefill, slower decode")
    chunk_tokens: int = setting(512, "largest part of one prompt in a step")
    growth_tokens: int = setting(256, "memory a running request has ahead of its tokens; it asks for more as it goes")
    reserve_wait_s: float = setting(30.0, "how long a hand-off may wait for memory here before it fails")
    transport: str = setting("nixl", "nixl, or none for a worker that neither gives nor takes")
    require_rdma: str = setting(
        "auto", "on = refuse a peer that is read over TCP, 100 times slower; auto = on for a GPU, off for CPU"
    )
    # What a read that does not end has taken comes back only when the agent that posted it is destroyed.
    doomed_limit_bytes: int = setting(
        0,
        "memory lost to reads that do not end, above which a new transfer generation frees it; 0 = 1/8 of the arena",
    )
    doomed_limit_s: float = setting(10.0, "the same for its age: a healthy read ends long before")
    generation_drain_s: float = setting(5.0, "how long healthy reads of an old transfer generation have to finish")
    verify: str = setting("none", "checksum: compare what was moved before it is used (both sides set it alike)")
    steps_in_flight: int = setting(0, "steps launched before the oldest has ended; 0 = 2 on a GPU, 1 on CPU")
    cuda_graphs: str = setting(
        "auto", "auto = capture decode and small prefill steps on a GPU; off = launch every kernel"
    )
    attention: str = setting(
        "auto",
        "of long stretches of prompts on a GPU: cudnn, flashinfer, triton, or auto = cudnn where it can be used",
    )
    threads: int = setting(1, "of torch within one operation, on CPU")
    grammar_threads: int = setting(4, "that compile grammars and compute what they allow next, beside the steps")

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise BadRequest(f"{name}={getattr(self, name)!r} is none of {', '.join(allowed)}", param=name)
        if not 0 < self.utilisation <= 1:
            raise BadRequest(f"utilisation={self.utilisation:g} must be above 0 and at most 1", param="utilisation")
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise BadRequest(f"{name}={getattr(self, name)} must be at least 1", param=name)
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise BadRequest(f"{name}={getattr(self, name)} must be 0 or more", param=name)

    @property
    def rdma_required(self) -> bool:
        return self.require_rdma == "on" or (self.require_rdma == "auto" and self.device != "cpu")

    @property
    def doomed_bytes(self) -> int:
        return self.doomed_limit_bytes or self.cache_bytes // DOOMED_SHARE

    @property
    def flights(self) -> int:
        """Steps that may be in flight at once."""
        return self.steps_in_flight or (1 if self.device == "cpu" else 2)
