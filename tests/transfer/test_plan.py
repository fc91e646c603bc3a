"""Coalesced and split ranges copy exactly what unit by unit would; nothing outside either arena can be planned."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinflow.cache.arena import ArenaGeometry
from twinflow.transfer.base import PeerArena, ReadRange
from twinflow.transfer.plan import plan_pull, split_posts

LOCAL = ArenaGeometry(total_bytes=16 * 12 + 40 * 6 + 7, block_bytes=16, slot_bytes=40, blocks=12, slots=6)
REMOTE = ArenaGeometry(total_bytes=16 * 20 + 40 * 9 + 3, block_bytes=16, slot_bytes=40, blocks=20, slots=9)


def peer_of(g: ArenaGeometry) -> PeerArena:
    return PeerArena(
        "p", "i", 1, 4096, g.total_bytes, g.block_bytes, g.slot_bytes, g.blocks, g.slots, "DRAM", 0, "a", b""
    )


PEER = peer_of(REMOTE)


@st.composite
def pairs(draw: st.DrawFn, remote: int, local: int) -> list[tuple[int, int]]:
    """Distinct local names; runs are likely, so that there is something to coalesce."""
    out: dict[int, int] = {}
    for _ in range(draw(st.integers(0, 4))):
        r, d = draw(st.integers(0, remote - 1)), draw(st.integers(0, local - 1))
        for i in range(draw(st.integers(1, 5))):
            if r + i < remote and d + i < local:
                out.setdefault(d + i, r + i)
    return draw(st.permutations([(r, d) for d, r in out.items()]))


def execute(ranges: list[ReadRange], source: bytes, target: bytearray) -> None:
    for r in ranges:
        assert 0 <= r.remote_offset <= len(source) - r.length
        assert 0 <= r.local_offset <= len(target) - r.length
        target[r.local_offset : r.local_offset + r.length] = source[r.remote_offset : r.remote_offset + r.length]


@given(pairs(20, 12), pairs(9, 6), st.integers(1, 200))
def test_same_bytes_as_unit_by_unit(
    blocks: list[tuple[int, int]], slots: list[tuple[int, int]], max_bytes: int
) -> None:
    source = bytes((i * 131 + i // 256) % 256 for i in range(REMOTE.total_bytes))
    expected = bytearray(LOCAL.total_bytes)
    for r, d in blocks:
        execute([ReadRange(REMOTE.block_offset(r), LOCAL.block_offset(d), 16)], source, expected)
    for r, d in slots:
        execute([ReadRange(REMOTE.slot_offset(r), LOCAL.slot_offset(d), 40)], source, expected)
    ranges = plan_pull(LOCAL, PEER, blocks, slots)
    assert ranges == sorted(ranges, key=lambda r: r.remote_offset) or len({r.remote_offset for r in ranges}) < len(
        ranges
    )
    assert sum(r.length for r in ranges) == 16 * len(blocks) + 40 * len(slots)
    got = bytearray(LOCAL.total_bytes)
    execute(ranges, source, got)
    assert got == expected

    posts = split_posts(ranges, max_bytes)
    assert all(0 < sum(r.length for r in post) <= max_bytes for post in posts)
    got = bytearray(LOCAL.total_bytes)
    execute([r for post in posts for r in post], source, got)
    assert got == expected


def test_runs_become_one_range_and_slots_descend() -> None:
    assert plan_pull(LOCAL, PEER, [(4, 1), (3, 0), (5, 2)], []) == [ReadRange(48, 0, 48)]
    (only,) = plan_pull(LOCAL, PEER, [], [(0, 2), (1, 3), (2, 4)])
    assert only == ReadRange(REMOTE.slot_offset(2), LOCAL.slot_offset(4), 120)
    assert len(plan_pull(LOCAL, PEER, [(3, 1), (4, 0)], [])) == 2
    assert plan_pull(LOCAL, PEER, [], []) == []


@pytest.mark.parametrize(
    ("blocks", "slots", "says"),
    [
        pytest.param([(20, 0)], [], "remote block 20", id="remote-block"),
        pytest.param([(-1, 0)], [], "remote block -1", id="negative"),
        pytest.param([(0, 12)], [], "local block 12", id="local-block"),
        pytest.param([], [(9, 0)], "remote slot 9", id="remote-slot"),
        pytest.param([], [(0, 6)], "local slot 6", id="local-slot"),
        pytest.param([(0, 1), (1, 1)], [], "local block 1", id="two-reads-one-target"),
        pytest.param([], [(0, 1), (1, 1)], "local slot 1", id="two-reads-one-slot"),
    ],
)
def test_names_outside_are_refused(blocks: list[tuple[int, int]], slots: list[tuple[int, int]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_pull(LOCAL, PEER, blocks, slots)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("block_bytes", 32, "block_bytes differ: 16 here, 32"),
        ("slot_bytes", 80, "slot_bytes differ: 40 here, 80"),
        ("blocks", 1000, "1000 blocks"),
        ("slots", -3, "slots=-3"),
        ("total_bytes", -1, "total_bytes=-1"),
        ("total_bytes", 10, "do not fit into 10 B"),
        ("base_address", (1 << 64) - 10, "address space"),
        ("base_address", -4096, "base_address=-4096"),
    ],
)
def test_a_peer_that_does_not_add_up_is_refused(field: str, value: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_pull(LOCAL, dataclasses.replace(PEER, **{field: value}), [(0, 0)], [])


def test_a_large_range_is_cut() -> None:
    posts = split_posts([ReadRange(100, 7, 25), ReadRange(500, 50, 3)], 10)
    assert posts == [
        [ReadRange(100, 7, 10)],
        [ReadRange(110, 17, 10)],
        [ReadRange(120, 27, 5), ReadRange(500, 50, 3)],
    ]
    with pytest.raises(ValueError, match="max_bytes=0"):
        split_posts([], 0)
