"""Answers of the admin API as tables for people and as plain values for JSON. Pure; workers with an error are left out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from services.cli.demo_table import positions
from twinflow.rpc.v1 import admin_pb2 as pb

KIB = 1024


@dataclass(frozen=True, slots=True)
class Section:
    """A table. `empty` is shown instead when it has no rows; columns named in `left` are text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    empty: str = "none"
    title: str = ""
    left: frozenset[str] = field(default=frozenset({"worker", "role", "address", "state", "model", "group", "kind"}))

    def lines(self) -> list[str]:
        head = [self.title] if self.title else []
        if not self.rows:
            return [*head, self.empty]
        body = [[str(cell) for cell in row] for row in self.rows]
        widths = [max(len(line[i]) for line in [list(self.columns), *body]) for i in range(len(self.columns))]
        return head + [self._line(cells, widths) for cells in [list(self.columns), *body]]

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = (
            cell.ljust(width) if name in self.left else cell.rjust(width)
            for cell, width, name in zip(cells, widths, self.columns, strict=True)
        )
        return "  ".join(padded).rstrip()


def workers(answer: pb.ListWorkersResponse) -> list[Section]:
    columns = (
        "worker", "role", "address", "state", "model", "requests", "waiting", "to prefill", "free blocks", "free slots",
    )  # fmt: skip
    rows = []
    for w in answer.workers:
        r, load = w.record, w.record.load
        state = "draining" if r.draining else "serving" if w.connected else "not connected"
        blocks, slots = f"{load.free_blocks}/{load.total_blocks}", f"{load.free_slots}/{load.total_slots}"
        rows.append(
            (r.id, r.role, ",".join(r.addresses), state, r.model, w.active_requests, load.waiting,
             w.queued_prefill_tokens, blocks, slots)
        )  # fmt: skip
    return [Section(columns, rows, "no worker is registered")]


def capacity(answer: pb.GetCapacityResponse) -> list[Section]:
    columns = (
        "worker", "group", "unit", "tokens", "total", "free", "cached", "held", "doomed", "pinned", "stored",
        "capacity",
    )  # fmt: skip
    rows = []
    for w in answered(answer.workers):
        for g in w.groups:
            fits = f"{g.total_units * g.block_tokens} tokens" if g.block_tokens else f"{g.total_units} states"
            rows.append(
                (w.worker_id, g.group, size(g.unit_bytes), g.block_tokens or "-", g.total_units, g.free_units,
                 g.cached_units, g.held_units, g.doomed_units, g.pinned_units, g.stored_units, fits)
            )  # fmt: skip
    return [Section(columns, rows, "no worker answered")]


def match(answer: pb.MatchPromptResponse) -> list[Section]:
    columns = ("worker", "attention", "checkpoints", "usable", "predicted attention", "predicted checkpoints")
    rows = [
        (w.worker_id, *held(w.groups), w.usable_tokens, *(held(w.predicted) if w.predicted else ("-", "-")))
        for w in answered(answer.workers)
    ]
    title = f"of {answer.prompt_tokens} prompt tokens"
    text = frozenset({"worker", "checkpoints", "predicted checkpoints"})
    return [Section(columns, rows, "no worker answered", title, left=text)]


def requests(answer: pb.ListRequestsResponse) -> list[Section]:
    running = ("worker", "request", "phase", "mode", "prompt", "processed", "generated", "age s", "blocks", "slots",
               "for", "prefilled by")  # fmt: skip
    leased = ("worker", "lease", "request", "reader", "state", "age s", "blocks", "slots")
    ours = list(answered(answer.workers))
    text = frozenset({"worker", "request", "phase", "mode", "for", "prefilled by", "lease", "reader", "state"})
    rows = [
        (w.worker_id, r.id, r.phase, r.mode, r.prompt_tokens, r.processed_tokens, r.generated_tokens,
         f"{r.age_s:.1f}", r.blocks, r.slots, r.owner or "-", r.prefill_worker or "-")
        for w in ours for r in w.requests
    ]  # fmt: skip
    leases = [
        (w.worker_id, x.lease_id, x.request_id, x.reader, "computed" if x.prefilled else "computing",
         f"{x.age_s:.1f}", x.blocks, x.slots)
        for w in ours for x in w.leases
    ]  # fmt: skip
    sections = [Section(running, rows, "no request is running", left=text)]
    return [*sections, Section(leased, leases, title="leases", left=text)] if leases else sections


def cancel(answer: pb.CancelRequestResponse) -> list[Section]:
    rows = [(w.worker_id, id) for w in answered(answer.workers) for id in w.cancelled]
    return [Section(("worker", "cancelled"), rows, "it runs nowhere", left=frozenset({"worker", "cancelled"}))]


def drain(answer: pb.DrainResponse | pb.UndrainResponse) -> list[Section]:
    rows = []
    for w in answered(answer.workers):
        state = "draining" if w.draining else "serving"
        rows.append((w.worker_id, state, "now" if w.changed else "before", w.requests, w.leases))
    columns = ("worker", "state", "since", "requests left", "hand-offs left")
    return [Section(columns, rows, "no worker answered", left=frozenset({"worker", "state", "since"}))]


def flush(answer: pb.FlushCacheResponse) -> list[Section]:
    rows = [(w.worker_id, g.group, g.units, size(g.bytes)) for w in answered(answer.workers) for g in w.groups]
    return [Section(("worker", "group", "dropped", "size"), rows, "no worker answered")]


def answered(entries: Iterable[Any]) -> Iterable[Any]:
    return (w for w in entries if not w.HasField("error"))


def held(groups: Iterable[pb.GroupMatch]) -> tuple[str, str]:
    """(attention reach, checkpoints)."""
    reach, points = "-", "-"
    for g in groups:
        if g.kind == "attention":
            reach = str(g.tokens)
        else:
            points = positions(g.checkpoints)
    return reach, points


def size(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= KIB and len(units) > 1:
        value, units = value / KIB, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def as_dict(message: Message) -> dict[str, Any]:
    """Every field by its name in the proto, numbers as numbers; messages that are not set are left out."""
    found: dict[str, Any] = {}
    for f in message.DESCRIPTOR.fields:
        value = getattr(message, f.name)
        if f.type == FieldDescriptor.TYPE_MESSAGE:
            if f.is_repeated:
                found[f.name] = [as_dict(item) for item in value]
            elif message.HasField(f.name):
                found[f.name] = as_dict(value)
        else:
            found[f.name] = list(value) if f.is_repeated else value
    return found
