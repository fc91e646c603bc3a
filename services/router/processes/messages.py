"""What the owner and an HTTP process say to each other, besides the registry's `Change`s, `Want`s and `Ended`s."""

from dataclasses import dataclass
from typing import Any

from services.router.admission.base import Ask, Permit
from services.router.config import RouterConfig
from services.router.view.prompt import PromptKeys
from twinflow.contracts.errors import TwinflowError

# ---- the owner says ----


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message. `index` of the process among its like."""

    config: RouterConfig
    index: int


@dataclass(frozen=True, slots=True)
class Stop:
    """No new requests; running ones have a while, unless `hurry`."""

    hurry: bool = False


@dataclass(frozen=True, slots=True)
class GiveMetrics:
    """Answered with the families of its registry."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Answers `Enter`. `idle` and `waiting` are the gate's at that moment."""

    permit: Permit
    idle: bool
    waiting: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Answers any question."""

    error: TwinflowError


# ---- an HTTP process says ----


@dataclass(frozen=True, slots=True)
class Ready:
    """It serves."""


@dataclass(frozen=True, slots=True)
class Enter:
    ask: Ask


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Whoever asked `Enter` under this number does not wait any more, whether it was granted or not."""

    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    permit_id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Least:
    """Answered with seconds to the first token."""

    prompt: PromptKeys
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Begun:
    id: str


@dataclass(frozen=True, slots=True)
class Gone:
    """An attempt that nobody runs, whether its place was granted or not."""

    id: str


@dataclass(frozen=True, slots=True)
class Scrape:
    """Answered with the page of metrics of all processes, as bytes."""


@dataclass(frozen=True, slots=True)
class Newest:
    """Answered with the newest decisions."""

    limit: int
    request_id: str


Answer = Any  # of the type that the question's docstring says, or Failed
