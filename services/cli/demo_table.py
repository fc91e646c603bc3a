"""The demo's table: a row per request, from what the client measured and what the cluster reported about it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """One request as its client saw it; `stats` is the response's `twinflow` extension (fields of RequestStats)."""

    label: str
    arrivals_s: tuple[float, ...]  # seconds after sending at which each piece of text arrived
    output_tokens: int
    stats: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals_s[0] if self.arrivals_s else None

    @property
    def second_gap_s(self) -> float | None:
        """Between the first and the second piece of text: what the hand-off costs the reader."""
        return self.arrivals_s[1] - self.arrivals_s[0] if len(self.arrivals_s) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if len(self.arrivals_s) < 2 or self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)


COLUMNS: tuple[tuple[str, str], ...] = (
    ("", "request"),
    ("prompt", "tokens"),
    ("decode had", "attn"),
    ("", "checkpoints"),
    ("prefill had", "attn"),
    ("", "checkpoints"),
    ("", "route"),
    ("moved", "blocks"),
    ("", "slots"),
    ("", "MiB"),
    ("", "MiB/s"),
    ("", "over"),
    ("TTFT", "ms"),
    ("1st-2nd", "ms"),
    ("TPOT", "ms"),
)
LEFT = {"request", "checkpoints", "route", "over"}


def cells(row: Measured) -> tuple[str, ...]:
    s = row.stats
    moved, seconds = int(s.get("bytes_moved", 0)), float(s.get("transfer_s", 0.0))
    remote = s.get("route") == "remote"
    return (
        row.label,
        str(s.get("prompt_tokens", "?")),
        str(s.get("decode_attention_tokens", "?")),
        positions(s.get("decode_checkpoints", ())),
        str(s.get("prefill_attention_tokens", "?")) if remote else "-",
        positions(s.get("prefill_checkpoints", ())) if remote else "-",
        str(s.get("route", "?")),
        str(s.get("blocks_moved", "?")) if remote else "-",
        str(s.get("slots_moved", "?")) if remote else "-",
        f"{moved / MIB:.2f}" if moved else "-",
        f"{moved / seconds / MIB:.0f}" if moved and seconds else "-",
        str(s.get("transport") or "-") if remote else "-",
        millis(row.ttft_s),
        millis(row.second_gap_s),
        millis(row.tpot_s),
    )


def table(rows: Sequence[Measured]) -> list[str]:
    """Lines of the table, headings first, then why each request took its route."""
    body = [cells(r) for r in rows]
    heads = [tuple(c[i] for c in COLUMNS) for i in (0, 1)]
    widths = [max(len(line[i]) for line in [heads[1], *body]) for i in range(len(COLUMNS))]
    out = [group_line(widths)]
    for line in [heads[1], *body]:
        out.append(
            "  ".join(pad(text, w, name) for text, w, (_, name) in zip(line, widths, COLUMNS, strict=True)).rstrip()
        )
    out.insert(2, "  ".join("-" * w for w in widths))
    reasons = [(r.label, str(r.stats.get("reason", ""))) for r in rows if r.stats.get("reason")]
    if reasons:
        out += ["", "why:"] + [f"  {label}: {reason}" for label, reason in reasons]
    return out


def group_line(widths: Sequence[int]) -> str:
    """The upper heading: group names start above the first column of their group."""
    line, at = "", 0
    for (group, _), width in zip(COLUMNS, widths, strict=True):
        if group:
            line = line.ljust(at)[: max(at, len(line))]
            line += (" " if line and not line.endswith(" ") else "") + group
        at += width + 2
    return line


def pad(text: str, width: int, name: str) -> str:
    return text.ljust(width) if name in LEFT else text.rjust(width)


def positions(checkpoints: Sequence[int]) -> str:
    """The deepest few checkpoints, e.g. "64, 512"."""
    if not checkpoints:
        return "none"
    shown = ", ".join(str(c) for c in checkpoints[-3:])
    return f"…, {shown}" if len(checkpoints) > 3 else shown


def millis(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}" if seconds >= 0.1 else f"{seconds * 1000:.1f}"
