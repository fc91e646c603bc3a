"""Settings of a router: from a TOML file (`--config`) and the command line, which wins. Names carry their unit."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinflow.contracts.errors import BadRequest
from twinflow.node.settings import read_settings


@dataclass(frozen=True, slots=True)
class RouterConfig:
    model: str  # folder with tokenizer.json, the chat template and the EOS ids; weights are not needed
    served_model: str = ""  # name in the API and in worker records; "" = the folder's name
    http_host: str = "127.0.0.1"
    http_port: int = 8000  # 0 = a free one
    grpc_host: str = "127.0.0.1"  # registry that workers dial
    grpc_port: int = 7000  # 0 = a free one
    fingerprint: str = ""  # accept only workers of this cache layout; "" = any, equal within a hand-off

    local_max_tokens: int = 128  # a suffix up to this long is prefilled by the decode worker itself
    max_requests: int = 1024  # at once; more are shed with 429
    max_body_bytes: int = 32 << 20
    max_prompts: int = 64  # prompts in one /v1/completions body
    default_max_tokens: int = 1024  # of a chat reply when the client sets none, less if the worker has less room
    default_completion_tokens: int = 16  # of a plain completion, as OpenAI's

    first_token_s: float = 300.0  # no token until then: 504
    keep_alive_s: float = 10.0  # SSE comment after this long without a token
    slow_client_s: float = 30.0  # one write blocked for longer: the client is dropped
    stats_wait_s: float = 1.0  # after a stop string cancelled the worker, how long to wait for its stats
    silence_s: float = 3.0  # without a message from a worker: lost
    shutdown_s: float = 10.0  # running requests may finish for this long
    buffer_tokens: int = 4096  # unread per request before the client counts as slow
    retry_after_s: int = 1  # told to clients with 429 and 503

    @property
    def model_name(self) -> str:
        return self.served_model or Path(self.model).resolve().name


def read_config(argv: Sequence[str]) -> RouterConfig:
    """Raises BadRequest that names the setting."""
    values = read_settings("python -m services.router.main", {"": (RouterConfig,)}, argv, description=__doc__ or "")[""]
    if "model" not in values:
        raise BadRequest("--model is missing: the folder with the model's tokenizer.json", param="model")
    return RouterConfig(**values)
