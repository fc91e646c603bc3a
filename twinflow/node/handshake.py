"""What both ends of a stream check in the first message: protocol range and, between workers, the cache layout. Pure."""

from dataclasses import dataclass

from twinflow.contracts.errors import Incompatible

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1


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


def same_layout(own: Layout, peer: Layout) -> None:
    """Raises Incompatible, with both layouts, unless bytes of the two workers are interchangeable."""
    if own.fingerprint != peer.fingerprint:
        raise Incompatible(
            f"cache layouts differ: {own.worker} has {own.fingerprint} = {own.description}; "
            f"{peer.worker} has {peer.fingerprint} = {peer.description}"
        )
