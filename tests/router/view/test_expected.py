"""Entries that are not true yet: seen at once, gone by themselves."""

import random
import time
from itertools import pairwise

import numpy as np
import pytest

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


@pytest.mark.parametrize("seed", range(20))
def test_like_the_definition(seed: int) -> None:
    """Random prompts, of which many share a beginning, against a plain dict; as long as nothing is over the bound."""
    draw, expected, now_s = random.Random(seed), Expected(), 0.0
    truth: dict[int, dict[int, float]] = {}  # key → column → until
    for _ in range(200):
        now_s += draw.random()
        column, family, length = draw.randrange(3), draw.randrange(4), draw.randrange(8)
        keys, until_s = [100 * family + i for i in range(length)], now_s + draw.choice([0.5, 2.0, 5.0])
        expected.add(column, keys, until_s, now_s)
        for key in keys:
            held = truth.get(key, {})
            last_s = max(held.values(), default=0.0)
            held = held if last_s > now_s else {}  # what is over does not come back
            truth[key] = dict.fromkeys({*held, column}, max(until_s, last_s))
        if draw.random() < 0.02:
            expected.forget(1)
            truth = {key: {c: t for c, t in held.items() if c != 1} for key, held in truth.items()}
        for key in draw.sample(range(400), 20):
            there = {c for c, t in truth.get(key, {}).items() if t > now_s}
            assert columns(expected, key, now_s) == there


def test_adding_takes_as_long_after_many_have_left() -> None:
    def adding_s(expected: Expected, now_s: float) -> float:
        began = time.thread_time()
        for i in range(300):
            expected.add(0, [draw.getrandbits(64) for _ in range(3)], now_s + 10, now_s + i / 100)
        return time.thread_time() - began

    draw, worn = random.Random(1), Expected()
    for i in range(650):
        worn.add(0, [draw.getrandbits(64) for _ in range(500)], i / 100 + 10, i / 100)
    assert len(worn) == 200_000  # and 125,000 have left
    fresh_s = min(adding_s(Expected(), 0.0) for _ in range(3))
    worn_s = min(adding_s(worn, 6.5 + 3 * k) for k in range(3))
    assert worn_s < 20 * fresh_s


def test_a_prefix_that_is_expected_again_and_again_is_bounded() -> None:
    expected = Expected(max_keys=100)
    for i in range(1000):
        expected.add(0, list(range(50)), i + 10.0, float(i))
    assert len(expected) == 50 and columns(expected, 49, 1000.0) == {0}
    assert len(expected._came) <= 11


def test_a_burst_leaves_in_pieces() -> None:
    expected, kept = Expected(), list[int]()
    for i in range(100):
        expected.add(0, range(1000 * i, 1000 * i + 1000), until_s=5.0, now_s=0.0)
    for i in range(400):
        expected.add(0, [10**6 + i], until_s=20.0, now_s=10.0)
        kept.append(len(expected))
    assert kept[0] > 99_000 and kept[-1] == 400
    assert max(a - b for a, b in pairwise(kept)) < 300
    assert columns(expected, 99_999, 10.0) == set()
