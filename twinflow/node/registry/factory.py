"""Which registry a process uses: the one place that chooses.

The address of Redis may hold a password, so it is read from an environment variable here and goes nowhere else: not into
a configuration, not into arguments, not into a log.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from twinflow.contracts.errors import BadRequest
from twinflow.contracts.workers import WorkerRecord
from twinflow.node.registry.base import HostedRegistry, Registration
from twinflow.node.registry.direct import DirectRegistration, DirectRegistry
from twinflow.node.registry.entries import Key
from twinflow.node.settings import setting


class RegistryKind(Enum):
    DIRECT = "direct"
    REDIS = "redis"


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """How workers and routers find each other: the same in every process of a cluster."""

    registry: RegistryKind = field(
        default=RegistryKind.DIRECT,
        metadata={"help": "how workers are found: they dial the routers, or all meet in a Redis"},
    )
    redis_url_env: str = setting(
        "TWINFLOW_REDIS_URL", "environment variable with redis://[user:password@]host:port/db (rediss:// for TLS)"
    )
    redis_prefix: str = setting("twinflow", "of every key, so that clusters can share a Redis")
    # Five beats: one lost packet or a short pause of the worker removes nobody.
    redis_ttl_s: float = setting(5.0, "a worker that wrote nothing for so long, and has no session either, is gone")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.redis_prefix):
            raise BadRequest(
                f"redis_prefix={self.redis_prefix!r} must be letters, digits, '_', '.' or '-'", param="redis_prefix"
            )
        if self.redis_ttl_s < 0.1:
            raise BadRequest(f"redis_ttl_s={self.redis_ttl_s} must be 0.1 or more", param="redis_ttl_s")

    @property
    def redis_url(self) -> str:
        """Raises BadRequest naming the variable."""
        url = os.environ.get(self.redis_url_env, "")
        if not url:
            raise BadRequest(f"registry=redis needs its URL in the environment variable {self.redis_url_env}")
        return url


def hosted_registry(settings: RegistrySettings, silence_s: float, alive: Callable[[Key], bool]) -> HostedRegistry:
    """The router's. `silence_s`: direct only; `alive`: whether there is a session with a worker incarnation, redis only.
    Raises BadRequest."""
    if settings.registry is RegistryKind.DIRECT:
        return DirectRegistry(silence_s)
    need_redis()
    from twinflow.node.registry.redis import RedisRegistry

    return RedisRegistry(settings.redis_url, settings.redis_prefix, settings.redis_ttl_s, alive)


def registration(
    settings: RegistrySettings, routers: Sequence[str], provide: Callable[[], WorkerRecord]
) -> Registration:
    """A worker's. `routers`: gRPC addresses, direct only. `provide` is called on the event loop before every heartbeat and
    must not block. Raises BadRequest."""
    if settings.registry is RegistryKind.DIRECT:
        return DirectRegistration(routers, provide)
    need_redis()
    from twinflow.node.registry.redis import RedisRegistration

    return RedisRegistration(settings.redis_url, settings.redis_prefix, settings.redis_ttl_s, provide)


def need_redis() -> None:
    """The client is an optional dependency. Raises BadRequest with the remedy."""
    if importlib.util.find_spec("redis") is None:
        raise BadRequest("registry=redis needs the redis client: pip install 'twinflow[redis]'", param="registry")
