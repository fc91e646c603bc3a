"""Bodies: what the fast parser takes is what Python's would have made of it; ids are told from what looks like ids."""

import json
import random

import pytest

from services.router.http.fields import as_ids
from services.router.http.parse import parse_json
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.hashing import pack_tokens


def value(draw: random.Random, depth: int) -> object:
    kind = draw.randrange(9 if depth else 7)
    if kind == 7:
        return [value(draw, depth - 1) for _ in range(draw.randrange(5))]
    if kind == 8:
        return {text(draw): value(draw, depth - 1) for _ in range(draw.randrange(5))}
    return [
        None,
        draw.random() < 0.5,
        draw.choice([0, -1, 2**63, -(2**64), draw.getrandbits(90), draw.randrange(10**6)]),
        draw.choice([-0.0, 1e308, 5e-324, draw.random(), draw.uniform(-1e9, 1e9), draw.random() * 1e-300]),
        text(draw),
        "",
        draw.randrange(2**32),
    ][kind]


def text(draw: random.Random) -> str:
    alphabet = 'ab \\"/\n\t\x00\x7f\u00e9\u2028\ufeff\U0001f600\uffff'
    return "".join(draw.choices(alphabet, k=draw.randrange(8)))


SEEDS = pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, 200, 50)], ids=str)


@SEEDS
def test_as_python_reads_it(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        made = value(draw, 4)
        data = json.dumps(made, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1])).encode()
        assert repr(parse_json(data)) == repr(json.loads(data)) == repr(made), seed


@SEEDS
def test_what_python_refuses_is_refused(seeds: range) -> None:
    """Broken at a random place: an error of ours, or the same value."""
    for seed in seeds:
        draw = random.Random(seed)
        data = bytearray(json.dumps(value(draw, 3), ensure_ascii=False).encode())
        at = draw.randrange(len(data))
        data[at : at + draw.randrange(2)] = draw.choice([b"", b"\xff", b"}", b",", b"\x00", b"9", b'"', b"\\"])
        try:
            wanted = repr(json.loads(bytes(data).decode()))
        except ValueError:
            wanted = "refused"
        try:
            got = repr(parse_json(bytes(data)))
        except BadRequest:
            got = "refused"
        assert got == wanted, seed


@pytest.mark.parametrize("data", [b"NaN", b"[Infinity]", b'{"a": -Infinity}', b'"\\ud800"', b'["a\\udc00b"]'])
def test_no_number_and_no_character(data: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_json(data)


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([1, 2, 3], True), ([0], True), ([1], True), ([2**40], True), ([-1], True), ([10**30, 5], True),
        ([], False), ([True], False), ([1, True], False), ([5, False, 6], False), ([2**40, True], False), ([5, 1.0], False),
        ([5, 1.5], False), ([5, "6"], False), ([5, None], False), ([[5]], False), ("56", False), (5, False), (None, False),
    ],
    ids=repr,
)  # fmt: skip
def test_as_ids(ids: object, wanted: bool) -> None:
    assert (as_ids(ids) is not None) is wanted


@pytest.mark.parametrize("bad", [-1, 100, 2**32, 2**32 + 5, 10**30], ids=str)
def test_ids_outside_the_vocabulary(bad: int) -> None:
    assert as_ids([0, 99]).known(100, "prompt", "prompt") == pack_tokens([0, 99])
    with pytest.raises(BadRequest, match=rf"token id {bad} is outside the vocabulary of 100"):
        as_ids([5, bad, 7]).known(100, "prompt", "prompt")
