"""Settings of a prefill worker: `FrontConfig`'s plus these. TOML: top level, `[engine]`, `[session]`."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinflow.contracts.errors import BadRequest
from twinflow.contracts.workers import Role
from twinflow.engine.front import FrontConfig, load_config
from twinflow.node.settings import setting

ROLES = (Role.PREFILL,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(FrontConfig):
    # Each queued one costs its prompt's bytes here; beyond this a decode worker is better off at another prefill worker.
    max_open: int = setting(256, "hand-offs that may be open at once, queued ones included")

    def __post_init__(self) -> None:
        if self.max_open < 1:
            raise BadRequest(f"max_open={self.max_open} must be 1 or more", param="max_open")


def load(argv: Sequence[str]) -> PrefillConfig:
    """Raises BadRequest naming the setting."""
    return load_config(PrefillConfig, "twinflow prefill", argv, ROLES)
