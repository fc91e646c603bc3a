"""Entries that are not true yet: seen at once, gone by themselves."""

import numpy as np

from services.router.view.expected import Expected
from services.router.view.table import WORDS


def columns(expected: Expected, key: int, now_s: float) -> set[int]:
    merged = expected.merge(np.zeros((1, WORDS), np.uint64), np.array([key], np.uint64), now_s)
    return set(np.flatnonzero(np.unpackbits(merged.view(np.uint8), bitorder="little")).tolist())


def test_until_its_time() -> None:
    expected = Expected()
    expected.add(3, [7, 2**64 - 1], until_s=5.0, now_s=0.0)
    expected.add(255, [7], until_s=9.0, now_s=1.0)
    assert columns(expected, 7, 4.0) == {3, 255} and columns(expected, 2**64 - 1, 4.0) == {3}
    assert columns(expected, 8, 4.0) == set()
    assert columns(expected, 2**64 - 1, 5.0) == set()


def test_an_old_entry_does_not_come_back_with_a_new_one() -> None:
    expected = Expected()
    expected.add(3, [7], until_s=5.0, now_s=0.0)
    expected.add(4, [7], until_s=9.0, now_s=6.0)
    assert columns(expected, 7, 7.0) == {4}


def test_a_worker_that_left_is_forgotten() -> None:
    expected = Expected()
    expected.add(3, [7, 8], until_s=5.0, now_s=0.0)
    expected.add(4, [7], until_s=5.0, now_s=0.0)
    expected.forget(3)
    assert columns(expected, 7, 1.0) == {4} and len(expected) == 1


def test_bounded_and_clean() -> None:
    expected = Expected(max_keys=10)
    expected.add(1, range(100), until_s=5.0, now_s=0.0)
    assert len(expected) == 10 and columns(expected, 99, 1.0) == {1}
    expected.add(1, [1000], until_s=20.0, now_s=10.0)
    assert len(expected) == 1
