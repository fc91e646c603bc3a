from collections.abc import Sequence

import numpy as np
import pytest

from twinflow.kernels.paged_attention.shared import (
    DEPTH,
    LEAST_BLOCKS,
    MOST_PREFIXES,
    SharedPrefixes,
    group_prefixes,
)

BLOCK = 4


def tables(rows: Sequence[Sequence[int]], width: int = 40) -> np.ndarray:
    table = np.full((len(rows), width), -1, dtype=np.int32)
    for row, blocks in zip(table, rows, strict=True):
        row[: len(blocks)] = blocks
    return table


def contexts(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """The last block holds one token."""
    return np.array([BLOCK * (len(blocks) - 1) + 1 if blocks else 0 for blocks in rows])


def group(rows: Sequence[Sequence[int]]) -> SharedPrefixes | None:
    return group_prefixes(tables(rows), contexts(rows), BLOCK)


def spans(shared: SharedPrefixes | None, rows: Sequence[Sequence[int]]) -> list[tuple[set[int], list[int]]]:
    """(rows, blocks) of each prefix."""
    if shared is None:
        return []
    order, found = shared.order.tolist(), []
    for start, end, low, high in shared.prefixes.tolist():
        if end:
            assert all(rows[r][low:high] == rows[order[start]][low:high] for r in order[start:end])
            found.append((set(order[start:end]), rows[order[start]][low:high]))
    return found


def check(shared: SharedPrefixes | None, rows: Sequence[Sequence[int]]) -> None:
    """Every row's prefixes lie one behind the other from its first block on, and leave its last token to it."""
    if shared is None:
        return
    order = shared.order.tolist()
    assert sorted(order) == list(range(len(rows)))
    assert [order[p] for p in shared.places.tolist()] == list(range(len(rows)))
    for row, (blocks, members) in enumerate(zip(rows, shared.members.tolist(), strict=True)):
        covered = 0
        for prefix in (p for p in members if p >= 0):
            start, end, low, high = shared.prefixes[prefix].tolist()
            assert end - start > 1 and start <= shared.places[row] < end and low == covered < high
            assert rows[order[start]][low:high] == blocks[low:high]
            covered = high
        assert shared.own_starts[row] == covered * BLOCK
        assert covered == 0 or covered < len(blocks)


def test_one_prefix() -> None:
    rows = [[1, 2, 3, 4, 5, 20], [9, 8, 7, 6, 5], [1, 2, 3, 4, 5, 21, 22], [1, 2, 3, 4, 5, 23]]
    shared = group(rows)
    check(shared, rows)
    assert spans(shared, rows) == [({0, 2, 3}, [1, 2, 3, 4, 5])]
    assert shared is not None and shared.own_starts.tolist() == [20, 0, 20, 20]


def test_prefixes_inside_a_prefix() -> None:
    system = [1, 2, 3, 4]
    first, second = [*system, 10, 11, 12, 13], [*system, 20, 21, 22, 23, 24]
    rows = [[*first, 30], [*second, 31], [*first, 32], [*second, 33], [*system, 34]]
    shared = group(rows)
    check(shared, rows)
    assert sorted(spans(shared, rows), key=lambda s: s[1]) == [
        ({0, 1, 2, 3, 4}, system),
        ({0, 2}, [10, 11, 12, 13]),
        ({1, 3}, [20, 21, 22, 23, 24]),
    ]


def test_an_inner_prefix_takes_over_what_is_too_short_outside() -> None:
    rows = [[1, 2, 5, 6, 7, 30], [1, 2, 5, 6, 7, 31], [1, 2, 8, 9], [1, 2, 10, 11]]
    shared = group(rows)
    check(shared, rows)
    assert spans(shared, rows) == [({0, 1}, [1, 2, 5, 6, 7])]


def test_a_row_that_ends_inside_the_prefix_of_others() -> None:
    long = list(range(1, 20))
    rows = [[*long, 30], [*long, 31], long[:8]]
    shared = group(rows)
    check(shared, rows)
    assert sorted(spans(shared, rows), key=lambda s: len(s[0])) == [({0, 1}, long[7:]), ({0, 1, 2}, long[:7])]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[1, 2, 3, 4, 5, 6]],
        [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]],
        [[1, 2, 3, 10], [1, 2, 3, 11]],
        [[], [], []],
        [[5, 1, 2, 3, 4, 6], [6, 1, 2, 3, 4, 7]],
    ],
    ids=("no rows", "one row", "nothing in common", "too short", "padding", "in common, not from the start"),
)
def test_nothing_to_share(rows: list[list[int]]) -> None:
    assert group(rows) is None


def test_the_last_token_stays_with_its_row() -> None:
    rows = [[1, 2, 3, 4, 5, 6]] * 2
    lens = np.array([24, 24])  # all six blocks full
    shared = group_prefixes(tables(rows), lens, BLOCK)
    assert shared is not None and shared.own_starts.tolist() == [20, 20]


def test_rows_with_context_zero_are_left_out() -> None:
    rows = [[1, 2, 3, 4, 5, 20], [1, 2, 3, 4, 5, 21], [1, 2, 3, 4, 5, 22]]
    lens = contexts(rows)
    lens[1] = 0
    shared = group_prefixes(tables(rows), lens, BLOCK)
    assert shared is not None and shared.own_starts.tolist() == [20, 0, 20]


def test_more_prefixes_than_there_is_room_for() -> None:
    rows = []
    for i in range(MOST_PREFIXES + 8):
        common = list(range(100 * i + 1, 100 * i + 1 + LEAST_BLOCKS + i))
        rows += [[*common, 100 * i + 90], [*common, 100 * i + 91]]
    shared = group_prefixes(tables(rows, 60), contexts(rows), BLOCK)
    check(shared, rows)
    found = spans(shared, rows)
    assert len(found) == MOST_PREFIXES
    assert min(len(blocks) for _, blocks in found) == LEAST_BLOCKS + 8  # the shortest are given up


def test_prefixes_nested_deeper_than_a_row_may_have() -> None:
    blocks = list(range(1, 36))
    rows = [[*blocks[: LEAST_BLOCKS * (i + 1)], 50 + i] for i in range(DEPTH + 3)]
    shared = group(rows)
    check(shared, rows)
    assert len(spans(shared, rows)) == DEPTH


@pytest.mark.parametrize("seed", range(20))
def test_random_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    paths: list[list[int]] = [[]]
    fresh = iter(range(1, 10_000))
    for _ in range(rng.integers(1, 12)):
        parent = paths[rng.integers(len(paths))]
        paths.append([*parent, *(next(fresh) for _ in range(rng.integers(1, 9)))])
    rows = [[*paths[rng.integers(len(paths))], *(next(fresh) for _ in range(rng.integers(1, 4)))] for _ in range(24)]
    rows = [r if rng.random() > 0.1 else [] for r in rows]
    shared = group_prefixes(tables(rows, 120), contexts(rows), BLOCK)
    check(shared, rows)
    if shared is None:
        starts = [tuple(r[:LEAST_BLOCKS]) for r in rows if len(r) > LEAST_BLOCKS]
        assert len(set(starts)) == len(starts)


def test_a_fixed_buffer_takes_over_what_changes() -> None:
    rows = [[1, 2, 3, 4, 5, 20], [9, 8, 7, 6, 5], [1, 2, 3, 4, 5, 21, 22]]
    fixed, found = SharedPrefixes.none(3), group(rows)
    assert found is not None
    address = fixed.own_starts.data_ptr()
    fixed.copy_(found)
    assert fixed.own_starts.data_ptr() == address
    for name in ("order", "places", "own_starts", "members", "prefixes"):
        assert getattr(fixed, name).equal(getattr(found, name))
