"""The pure part of the redis registry: entries as text, and which workers follow from a scan."""

import json

import pytest

from tests.node.backends import record
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.workers import Load
from twinflow.node.registry.entries import SCHEMA, Entry, Members, decode, encode
from twinflow.node.registry.memory import MemoryRegistry


def test_round_trip_is_the_identity() -> None:
    entry = Entry(record(load=Load(1, 2, 1 << 31, 4, 5, 6, 7), draining=True), 1_764_000_000_000_001)
    assert decode(encode(entry)) == entry


def test_fields_of_a_newer_release_are_ignored() -> None:
    document = json.loads(encode(Entry(record(), 1)))
    document["record"]["color"] = "blue"
    assert decode(json.dumps(document | {"zone": "a"}).encode()) == Entry(record(), 1)


def other(**changes: object) -> bytes:
    document = json.loads(encode(Entry(record(), 1)))
    return json.dumps(document | changes).encode()


MALFORMED = {
    "empty": (b"", "not an entry"),
    "no-text": (b"\xff\xfe", "not an entry"),
    "no-json": (b"{", "not an entry"),
    "no-object": (b"[1]", "not an entry"),
    "nothing-in-it": (b"{}", "not an entry"),
    "newer-schema": (other(schema=SCHEMA + 1), f"schema {SCHEMA + 1}, this release reads {SCHEMA}"),
    "order": (other(order="late"), "not an entry"),
    "null": (other(record=None), "not an entry"),
    "type": (other(record={"id": 5}), "not an entry"),
    "role": (other(record={"id": "w", "role": "chef"}), "unknown role 'chef'"),
    "no-addresses": (other(record={"id": "w", "incarnation": "i", "role": "decode"}), "needs id, incarnation"),
    "deep": (b"[" * 100_000, "not an entry"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case: str) -> None:
    text, complaint = MALFORMED[case]
    with pytest.raises(BadRequest) as caught:
        decode(text)
    assert complaint in caught.value.message


class World:
    def __init__(self) -> None:
        self.table = MemoryRegistry()
        self.alive: set[tuple[str, str]] = set()
        self.members = Members(self.table, self.alive.__contains__)

    def scan(self, *entries: Entry, left: tuple[tuple[str, str], ...] = (), patient: bool = False) -> list[str]:
        self.members.apply(entries, left, patient=patient)
        return sorted("/".join(r.key) for r in self.table.records().values())


OLD, NEW = Entry(record(), 10), Entry(record(incarnation="i2"), 20)


@pytest.mark.parametrize("entries", [(OLD, NEW), (NEW, OLD)], ids=["old-first", "new-first"])
def test_the_youngest_incarnation_counts(entries: tuple[Entry, Entry]) -> None:
    world = World()
    assert world.scan(*entries) == ["w0/i2"]
    assert world.scan(*reversed(entries)) == ["w0/i2"]


def test_an_old_incarnation_that_still_writes_hides_nothing() -> None:
    world = World()
    assert world.scan(NEW) == ["w0/i2"]
    assert world.scan(OLD, patient=True) == ["w0/i2"]
    world.alive.add(NEW.record.key)
    assert world.scan(OLD) == ["w0/i2"], "its session is up"


def test_an_old_incarnation_serves_again_once_the_younger_one_is_gone() -> None:
    world = World()
    world.scan(OLD, NEW)
    assert world.scan(OLD) == ["w0/i1"]


def test_absence_removes_unless_patient_or_alive() -> None:
    world = World()
    world.scan(OLD)
    assert world.scan(patient=True) == ["w0/i1"]
    world.alive.add(OLD.record.key)
    assert world.scan() == ["w0/i1"]
    world.alive.clear()
    assert world.scan() == []


@pytest.mark.parametrize("patient", [False, True])
def test_a_goodbye_removes_whatever_the_session_says(patient: bool) -> None:
    world = World()
    world.alive.add(OLD.record.key)
    world.scan(OLD)
    assert world.scan(left=(OLD.record.key,), patient=patient) == []
    assert world.scan(OLD, left=(OLD.record.key,)) == ["w0/i1"], "it came back"


def test_a_goodbye_of_an_old_incarnation_is_none_of_the_new_one() -> None:
    world = World()
    world.scan(NEW)
    assert world.scan(NEW, left=(OLD.record.key,)) == ["w0/i2"]
