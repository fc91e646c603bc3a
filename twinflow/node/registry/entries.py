"""What the redis registry keeps, apart from Redis: entries as text, and which workers follow from them. Pure.

An entry is one incarnation's record, `{"schema": 1, "order": …, "record": {…}}`. `order` grows with every start that
registers (microseconds of the Redis server's clock at the first write): of several incarnations under one id the youngest
counts, so that one that lingers, or comes back, never hides its successor.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf import json_format

from twinflow.contracts.errors import BadRequest
from twinflow.contracts.workers import WorkerRecord
from twinflow.node.registry.base import record_problem
from twinflow.node.registry.memory import MemoryRegistry
from twinflow.rpc.convert import record_from_pb, record_to_pb
from twinflow.rpc.v1 import engine_pb2 as pb

SCHEMA = 1  # of an entry; a reader ignores, and logs, what has another one. Fields may be added without a new number.

Key = tuple[str, str]  # worker id, incarnation


@dataclass(frozen=True, slots=True)
class Entry:
    record: WorkerRecord
    order: int


def encode(entry: Entry) -> bytes:
    record = json_format.MessageToDict(record_to_pb(entry.record), preserving_proto_field_name=True)
    return json.dumps({"schema": SCHEMA, "order": entry.order, "record": record}, separators=(",", ":")).encode()


def decode(text: bytes) -> Entry:
    """Raises BadRequest that says what is wrong."""
    try:
        document = json.loads(text)
        schema, order, fields = document["schema"], document["order"], document["record"]
        if schema != SCHEMA:
            raise BadRequest(f"schema {schema!r}, this release reads {SCHEMA}")
        message = json_format.ParseDict(fields, pb.WorkerRecord(), ignore_unknown_fields=True)
        entry = Entry(record_from_pb(message), int(order))
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError, json_format.ParseError) as e:
        raise BadRequest(f"not an entry of a worker ({type(e).__name__}: {e})") from None
    if problem := record_problem(entry.record):
        raise BadRequest(problem)
    return entry


class Members:
    """Applies scans to a table. `alive` says whether a worker's session is up: as long as it is, silence removes nothing,
    only a leave or a younger incarnation does.
    """

    def __init__(self, table: MemoryRegistry, alive: Callable[[Key], bool]) -> None:
        self._table = table
        self._alive = alive
        self._orders: dict[Key, int] = {}  # of the workers in the table

    def apply(self, entries: Iterable[Entry], left: Iterable[Key], *, patient: bool) -> None:
        """One whole scan: `entries` are all that are there now, `left` said goodbye since the last one. `patient`: the
        absence of an entry proves nothing yet, since workers may not have had the time to write it again."""
        youngest: dict[str, Entry] = {}
        for entry in entries:
            known = youngest.get(entry.record.id)
            if known is None or entry.order > known.order:
                youngest[entry.record.id] = entry
        gone = set(left)
        for record in self._table.records().values():
            found = youngest.get(record.id)
            if found is not None and found.order >= self._orders[record.key]:
                continue  # the same one, or its successor
            if record.key in gone or not (patient or self._alive(record.key)):
                self._table.remove(record)
            else:
                youngest.pop(record.id, None)  # an older incarnation still writes; this one stays
        for entry in youngest.values():
            self._table.put(entry.record)
        self._orders = {r.key: self._order(r, youngest.get(r.id)) for r in self._table.records().values()}

    def _order(self, record: WorkerRecord, entry: Entry | None) -> int:
        return entry.order if entry is not None else self._orders[record.key]
