"""The tag that travels with every stored, moved or offloaded state."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateTag:
    """Names exactly one state: after `position` tokens whose prefix hash is `prefix_hash`, of model layout `fingerprint`.

    A state is used only where its tag equals the expected one; "has a state" is never inferred from a token count.
    """

    prefix_hash: bytes
    position: int
    fingerprint: str
