"""What both ends of a stream check in the first message: protocol range and, between workers, the cache layout. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from twinflow.contracts.errors import Incompatible

# Raised when a message changes its meaning. What is only added is a feature: used where both sides name it, so that releases
# can be mixed during an upgrade.
PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

CHECKPOINT = "checkpoint"  # `Open.want_checkpoint_at` and `Finished.checkpoint`
FIRST_WITH_END = "first-with-end"  # `Finished.first_token`
GENERATIONS = "generations"  # `Renewed` within a session
GRAMMAR = "grammar"  # `Sampling.grammar`
VERIFY = "verify=checksum"  # what is announced carries checksums


@dataclass(frozen=True, slots=True)
class Layout:
    """A worker's cache layout as it is compared: `description` is the canonical text behind `fingerprint`."""

    worker: str
    fingerprint: str
    description: str


def negotiate(peer: str, protocol_min: int, protocol_max: int) -> int:
    """The highest protocol that both sides speak. Raises Incompatible naming both ranges."""
    protocol = min(protocol_max, PROTOCOL_MAX)
    if protocol < max(protocol_min, PROTOCOL_MIN):
        raise Incompatible(
            f"{peer} speaks protocol {protocol_min} to {protocol_max}, this side {PROTOCOL_MIN} to {PROTOCOL_MAX}: "
            "upgrade the older one"
        )
    return protocol


def features(*, verify: bool) -> tuple[str, ...]:
    """What this side says in its hello."""
    always = (CHECKPOINT, FIRST_WITH_END, GENERATIONS, GRAMMAR)
    return (*always, VERIFY) if verify else always


def same_verify(peer: str, own: Collection[str], theirs: Collection[str]) -> None:
    """Raises Incompatible if this side would refuse what the peer offers, for want of checksums. A peer that names no features
    is of an older release and may have them."""
    if VERIFY in own and theirs and VERIFY not in theirs:
        raise Incompatible(f"verify=checksum is set here and not at {peer}: set engine.verify alike on both")


def same_layout(own: Layout, peer: Layout) -> None:
    """Raises Incompatible, with both layouts, unless bytes of the two workers are interchangeable."""
    if own.fingerprint != peer.fingerprint:
        raise Incompatible(
            f"cache layouts differ: {own.worker} has {own.fingerprint} = {own.description}; "
            f"{peer.worker} has {peer.fingerprint} = {peer.description}"
        )
