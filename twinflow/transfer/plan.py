"""The pure half of a pull: which bytes of the peer's arena go where in ours.

`plan_pull` trusts nothing the peer said: every remote and local name is bounds-checked, so that a bad peer can make us
neither read nor write outside of both arenas. `split_posts` cuts the plan to what one READ may carry.
"""

from collections.abc import Iterable, Sequence

from twinflow.cache.arena import ArenaGeometry
from twinflow.transfer.base import MAX_POST_BYTES, PeerArena, ReadRange

ADDRESS_LIMIT = 1 << 64

Pair = tuple[int, int]  # (remote, local)


def remote_geometry(peer: PeerArena) -> ArenaGeometry:
    """The peer's arena as geometry. Raises ValueError when what the peer says of itself does not add up."""
    for name in ("base_address", "total_bytes", "blocks", "slots"):
        value = getattr(peer, name)
        if value < 0:
            raise ValueError(f"peer {peer.worker_id}: {name}={value} is negative")
    if peer.base_address + peer.total_bytes > ADDRESS_LIMIT:
        raise ValueError(
            f"peer {peer.worker_id}: base_address={peer.base_address:#x} + total_bytes={peer.total_bytes} "
            f"is beyond the address space"
        )
    return ArenaGeometry(peer.total_bytes, peer.block_bytes, peer.slot_bytes, peer.blocks, peer.slots)


def plan_pull(
    local: ArenaGeometry, remote: PeerArena, blocks: Sequence[Pair], slots: Sequence[Pair]
) -> list[ReadRange]:
    """Ranges that read `blocks` and `slots`, pairs of (remote, local) names, sorted by remote offset and coalesced
    wherever both sides are contiguous.

    Raises ValueError naming the value: unequal unit sizes, a name outside either arena, a local name given twice.
    """
    for name in ("block_bytes", "slot_bytes"):
        ours, theirs = getattr(local, name), getattr(remote, name)
        if ours != theirs:
            raise ValueError(f"{name} differ: {ours} here, {theirs} at peer {remote.worker_id}")
    far = remote_geometry(remote)
    _refuse_twice("block", blocks)
    _refuse_twice("slot", slots)
    ranges = []
    for kind, size, pairs, step in (("block", local.block_bytes, blocks, 1), ("slot", local.slot_bytes, slots, -1)):
        for theirs, ours, count in _runs(pairs, step):
            last = (count - 1) * step
            _at(far, kind, theirs + last, "remote")
            _at(local, kind, ours + last, "local")
            ranges.append(ReadRange(_at(far, kind, theirs, "remote"), _at(local, kind, ours, "local"), count * size))
    return coalesce(ranges)


def _runs(pairs: Sequence[Pair], step: int) -> list[tuple[int, int, int]]:
    """(remote, local, how many) of neighbours on both sides, by ascending address; the next name is `step` more."""
    runs: list[tuple[int, int, int]] = []
    begin, after, count = (0, 0), (0, 0), 0
    for theirs, ours in sorted(pairs, reverse=step < 0):
        if count and theirs == after[0] and ours == after[1]:
            count += 1
        else:
            if count:
                runs.append((*begin, count))
            begin, count = (theirs, ours), 1
        after = (theirs + step, ours + step)
    return [*runs, (*begin, count)] if count else runs


def coalesce(ranges: Iterable[ReadRange]) -> list[ReadRange]:
    """Sorted by remote offset (slots descend with their number), neighbours on both sides merged."""
    out: list[ReadRange] = []
    for r in sorted(ranges, key=lambda r: (r.remote_offset, r.local_offset)):
        last = out[-1] if out else None
        if (
            last is not None
            and last.remote_offset + last.length == r.remote_offset
            and last.local_offset + last.length == r.local_offset
        ):
            out[-1] = ReadRange(last.remote_offset, last.local_offset, last.length + r.length)
        else:
            out.append(r)
    return out


def split_posts(ranges: Iterable[ReadRange], max_bytes: int = MAX_POST_BYTES) -> list[list[ReadRange]]:
    """Groups of ranges in order, each at most `max_bytes` together; a range larger than that is cut."""
    if max_bytes <= 0:
        raise ValueError(f"max_bytes={max_bytes} must be positive")
    posts: list[list[ReadRange]] = []
    room = 0
    for r in ranges:
        for at in range(0, r.length, max_bytes):
            piece = ReadRange(r.remote_offset + at, r.local_offset + at, min(max_bytes, r.length - at))
            if piece.length > room:
                posts.append([])
                room = max_bytes
            posts[-1].append(piece)
            room -= piece.length
    return posts


def _at(geometry: ArenaGeometry, kind: str, unit: int, side: str) -> int:
    try:
        return geometry.block_offset(unit) if kind == "block" else geometry.slot_offset(unit)
    except ValueError as e:
        raise ValueError(f"{side} {e}") from None


def _refuse_twice(kind: str, pairs: Sequence[Pair]) -> None:
    targets = [local for _, local in pairs]
    if len(set(targets)) < len(targets):
        local = next(t for t in targets if targets.count(t) > 1)
        raise ValueError(f"local {kind} {local} is the target of two reads")
