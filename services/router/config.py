"""Settings of a router: from a TOML file (`--config`) and the command line, which wins. Names carry their unit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.router.admission.gate import GateSettings
from services.router.schedule.base import Policy
from services.router.schedule.policies import policy_named
from twinflow.contracts.errors import BadRequest
from twinflow.node.pulse import SessionTimes
from twinflow.node.registry.factory import RegistrySettings
from twinflow.node.settings import read_settings, setting, take


@dataclass(frozen=True, slots=True)
class RouterConfig:
    model: str = setting("", "folder with tokenizer.json, chat template and EOS ids; weights are not needed")
    served_model: str = setting("", "name in the API and in worker records (default: the folder's name)")
    tool_parser: str = setting("auto", "how the model writes tool calls: auto (its chat template tells), none, qwen_xml, hermes, "
                               "nemotron or granite")  # fmt: skip
    reasoning_parser: str = setting(
        "auto", "whether replies have thoughts in <think> tags: auto (the chat template tells), none or think"
    )
    http_host: str = setting("127.0.0.1", "where clients connect")
    http_port: int = setting(8000, "0 = a free one")
    grpc_host: str = setting("127.0.0.1", "where workers register")
    grpc_port: int = setting(7000, "0 = a free one")
    fingerprint: str = setting("", "accept only workers of this cache layout (default: any, equal within a hand-off)")
    admin_token: str = setting(
        "", "who sends it as a bearer token may read /v1/internal/explain; without one nobody can"
    )
    log_level: str = setting("INFO", "DEBUG, INFO, WARNING or ERROR")
    registry: RegistrySettings = field(default_factory=RegistrySettings)

    policy: str = setting("cost", "how workers are chosen: cost; or, to compare with, min_of_groups, attention_only, "
                          "least_loaded or round_robin")  # fmt: skip
    local_max_tokens: int = setting(256, "a suffix up to this long may be left to the decode worker: with policy cost where "
                                    "that is cheaper, else always; 0 = never where there are prefill workers")  # fmt: skip
    index_bytes: int = setting(
        1 << 30, "of the index of what workers hold, reserved as it fills; the oldest entries go first"
    )
    stall_s: float = setting(10.0, "a worker with running requests that made no step for so long hangs: they are moved")
    max_requests: int = setting(1024, "generations at once; more wait in the queue")
    api_keys: str = setting("", "TOML file with API keys and their limits, followed while it changes; without one anybody may "
                            "ask, without limits")  # fmt: skip
    keys_reload_s: float = setting(2.0, "how often the router looks whether that file has changed")
    queue_requests: int = setting(1024, "requests that wait here while workers have no room; one more, and the key that has "
                                  "most waiting loses its last with 429; 0 = none waits")  # fmt: skip
    queue_s: float = setting(30.0, "a request that waited here for so long gets 504; less than proxies before the router wait "
                             "for a first byte, often 60 s")  # fmt: skip
    worker_queue_s: float = setting(1.0, "prompts of so many seconds may wait at a worker, more are kept here: "
                                    "little, for only here the order is fair; enough to keep workers busy")  # fmt: skip
    priority_s: float = setting(
        5.0, "a request goes before others of its key that came so much earlier, per step of priority"
    )
    processes: int = setting(
        1, "of HTTP on one port. More than one have another beside them, which owns registry, view and choice"
    )
    max_body_bytes: int = setting(32 << 20, "of one HTTP body")
    max_prompts: int = setting(64, "choices of one request: prompts × n")
    default_max_tokens: int = setting(1024, "of a chat reply when the client sets none, or what room is left if less")
    default_completion_tokens: int = setting(16, "of a plain completion when the client sets none, as OpenAI's")

    first_token_s: float = setting(300.0, "no token until then: 504")
    keep_alive_s: float = setting(10.0, "a stream gets an SSE comment after this long without a token")
    slow_client_s: float = setting(30.0, "a client is dropped after one write was blocked for this long")
    stats_wait_s: float = setting(1.0, "after a stop string: how long to wait for the worker's stats")
    silence_s: float = setting(3.0, "a worker that said nothing for so long is lost")
    heartbeat_s: float = setting(0.5, "how often the router beats on its sessions")
    admin_s: float = setting(3.0, "an admin call waits for the answer of each worker for so long")
    shutdown_s: float = setting(10.0, "running requests may finish for this long on SIGTERM")
    buffer_tokens: int = setting(4096, "unread tokens of one request before its client counts as slow")
    retry_after_s: int = setting(1, "told to clients that may try again, where nothing better is known")

    def __post_init__(self) -> None:
        if not self.model:
            raise BadRequest("no model: give --model, the folder with the model's tokenizer.json", param="model")
        if self.local_max_tokens < 0 or self.default_max_tokens < 1 or self.default_completion_tokens < 1:
            raise BadRequest("local_max_tokens must be 0 or more, the default lengths 1 or more")
        if self.index_bytes < 1 or self.stall_s <= 0:
            raise BadRequest(f"index_bytes={self.index_bytes} and stall_s={self.stall_s} must be more than 0")
        if self.max_requests < 1 or self.queue_requests < 0 or self.retry_after_s < 1:
            raise BadRequest(
                f"max_requests={self.max_requests} and retry_after_s={self.retry_after_s} must be 1 or more, "
                f"queue_requests={self.queue_requests} 0 or more"
            )
        if min(self.queue_s, self.worker_queue_s, self.keys_reload_s) <= 0 or self.priority_s < 0:
            raise BadRequest(
                f"queue_s={self.queue_s:g}, worker_queue_s={self.worker_queue_s:g} and keys_reload_s={self.keys_reload_s:g} "
                f"must be more than 0, priority_s={self.priority_s:g} 0 or more"
            )
        if self.processes < 1:
            raise BadRequest(f"processes={self.processes} must be 1 or more", param="processes")
        policy_named(self.policy)

    @property
    def model_name(self) -> str:
        return self.served_model or Path(self.model).resolve().name

    @property
    def scheduling(self) -> Policy:
        return policy_named(self.policy, local_max_tokens=self.local_max_tokens, fingerprint=self.fingerprint)

    @property
    def keys_file(self) -> Path | None:
        return Path(self.api_keys) if self.api_keys else None

    @property
    def gate(self) -> GateSettings:
        return GateSettings(
            max_requests=self.max_requests,
            queue_requests=self.queue_requests,
            queue_s=self.queue_s,
            priority_s=self.priority_s,
            retry_after_s=self.retry_after_s,
        )

    @property
    def times(self) -> SessionTimes:
        return SessionTimes(heartbeat_s=self.heartbeat_s, silence_s=self.silence_s)


TABLES = {"": (RouterConfig, RegistrySettings)}  # what a file and the command line can say


def read_config(argv: Sequence[str]) -> RouterConfig:
    """Raises BadRequest that names the setting."""
    values = read_settings("twinflow router", TABLES, argv, description="A router.")[""]
    return RouterConfig(registry=take(RegistrySettings, values), **values)
