"""Settings of a decode worker: `FrontConfig`'s plus these. TOML: top level, `[engine]`, `[session]`."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinflow.contracts.errors import BadRequest
from twinflow.contracts.workers import Role
from twinflow.engine.front import FrontConfig, load_config
from twinflow.node.settings import setting

ROLES = (Role.DECODE, Role.BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(FrontConfig):
    # Default: about what one hand-off costs, and short enough to fit into a decode step without hurting running streams.
    local_max_tokens: int = setting(256, "suffixes up to so many tokens are computed here, prefill workers or not")

    def __post_init__(self) -> None:
        if self.local_max_tokens < 0:
            raise BadRequest(f"local_max_tokens={self.local_max_tokens} must be 0 or more", param="local_max_tokens")


def load(argv: Sequence[str]) -> DecodeConfig:
    """Raises BadRequest naming the setting."""
    return load_config(DecodeConfig, "twinflow decode", argv, ROLES)
