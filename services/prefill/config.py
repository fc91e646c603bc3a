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

    # What one reader that has run out of memory can keep leased here while it waits.
    credits: int = setting(64, "hand-offs that one decode worker may have open here at once; it keeps the others back")

    def __post_init__(self) -> None:
        for name in ("max_open", "credits"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name}={getattr(self, name)} must be 1 or more", param=name)


def load(argv: Sequence[str]) -> PrefillConfig:
    """Raises BadRequest naming the setting."""
    return load_config(PrefillConfig, "twinflow prefill", argv, ROLES)
