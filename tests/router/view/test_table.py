"""The table against plain sets; what it forgets, and what it costs."""

import random

import numpy as np
import pytest

from services.router.view.table import COLUMNS, FILL, ROW_BYTES, KeyTable


def keys(*values: int) -> np.ndarray:
    """Spread over 64 bits, as hashes are."""
    return np.array([v * 0x9E3779B97F4A7C15 % 2**64 for v in values], np.uint64)


def columns(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def sets(table: KeyTable, wanted: np.ndarray) -> list[set[int]]:
    bits = np.unpackbits(table.lookup(wanted).view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_equal_plain_sets(seed: int) -> None:
    draw, table = random.Random(seed), KeyTable(1 << 20)
    model: dict[int, set[int]] = {}
    for _ in range(120):
        pairs = list({(draw.randrange(2000), draw.randrange(COLUMNS)) for _ in range(draw.randrange(1, 150))})
        at, of = keys(*(k for k, _ in pairs)), columns(*(c for _, c in pairs))
        if draw.random() < 0.6:
            table.add(at, of)
            for k, c in pairs:
                model.setdefault(k, set()).add(c)
        else:
            table.discard(at, of)
            for k, c in pairs:
                model.get(k, set()).discard(c)
            model = {k: s for k, s in model.items() if s}
        assert len(table) == len(model)
    assert sets(table, keys(*range(2000))) == [model.get(k, set()) for k in range(2000)]
    for column in range(0, COLUMNS, 17):
        assert table.count(column) == sum(column in s for s in model.values())


@pytest.mark.parametrize("again", [False, True], ids=["gone", "stored-again"])
def test_a_freed_row_that_still_has_the_key_is_not_the_key(again: bool) -> None:
    """Its first bucket keeps the key in a row that is free; stored again it lives in the other one, which is emptier then."""
    table, beside = KeyTable(1 << 20), [(1 << 7 | 2, 2), (1 << 8 | 2, 2)]  # (low, high): bucket 2 is both of theirs
    key, *others = (np.array([high << 32 | low], np.uint64) for low, high in [(2, 9), *beside])
    for k in (key, *others):
        table.add(k, columns(3))
    (freed,) = table._find(key)
    table.discard(key, columns(3))
    assert table._keys[freed] == key[0] and not table._ages[freed]
    if again:
        table.add(key, columns(4))
        assert table._find(key)[0] // 8 == 9, "in the other bucket"
    wanted = {4} if again else set()
    assert sets(table, np.concatenate([key, *others])) == [wanted, {3}, {3}]
    assert table.columns(int(key[0])) == sum(1 << c for c in wanted) and len(table) == 2 + again
    table.add(key, columns(5))
    assert sets(table, key) == [wanted | {5}] and (len(table), table.count(5)) == (3, 1)


def test_an_entry_costs_48_bytes_when_the_table_is_full() -> None:
    table = KeyTable(1 << 20)
    for at in range(0, 40_000, 500):
        table.add(keys(*range(at, at + 500)), np.zeros(500, np.int64))
        assert table.used_bytes <= 1 << 20
    assert len(table) > 0.95 * table.capacity
    assert ROW_BYTES / FILL == 48 and table.used_bytes / table.capacity < 48.1


def test_the_oldest_go_first_and_what_is_stored_again_is_young() -> None:
    table = KeyTable(1 << 20)
    total = table.capacity
    for at in range(0, total + total // 4, 200):
        table.add(keys(*range(at, at + 200)), np.zeros(200, np.int64))
        table.add(keys(7), columns(1))  # used all the time
    known = [bool(s) for s in sets(table, keys(*range(total + total // 4)))]
    assert known[7]
    assert not any(known[:7]) and all(known[total // 2 :])
    early = known[total // 4 + total // 32 :].count(
        False
    )  # a sixty-fourth goes at a time; few more, out of full buckets
    assert early < 0.02 * total


def test_growth_keeps_everything_but_one_in_a_hundred_thousand() -> None:
    table, small = KeyTable(1 << 25), KeyTable(1).used_bytes
    assert table.used_bytes == small < 32 << 10
    stored = np.random.default_rng(0).integers(0, 2**64 - 1, 100_000, dtype=np.uint64)
    for at in range(0, 100_000, 500):
        table.add(stored[at : at + 500], np.full(500, 5))
        assert table.used_bytes < 3 * max(small, len(table) * ROW_BYTES)
    assert len(table) == table.count(5) >= 100_000 - 3
    assert sets(table, stored).count({5}) == len(table)


def test_a_column_is_emptied_by_and_by() -> None:
    table = KeyTable(1 << 22)
    table.add(keys(*range(20_000)), np.full(20_000, 3))
    table.add(keys(*range(5_000)), np.full(5_000, 200))
    table.empty(3)
    assert not table.emptied(3) and table.count(3) == 0
    table.add(keys(*range(30_000, 50_000)), np.full(20_000, 200))  # grows meanwhile
    table.finish_emptying()
    assert table.emptied(3) and len(table) == 25_000
    assert all(s == {200} for s in sets(table, keys(*range(5_000))))
    assert not any(sets(table, keys(*range(5_000, 20_000))))


def test_ages_start_again_without_losing_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.view.table.LAST_EPOCH", 70)
    table = KeyTable(1 << 20)
    total = table.capacity
    for at in range(0, 3 * total, 100):
        table.add(keys(*range(at, at + 100)), np.zeros(100, np.int64))
    known = [bool(s) for s in sets(table, keys(*range(3 * total)))]
    assert all(known[-total // 2 :]) and not any(known[:total])
