"""Lengths of requests from a trace file: Mooncake's JSON lines or Azure's CSV."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path

from twinflow.contracts.errors import BadRequest

MOONCAKE = ("input_length", "output_length")
AZURE = ("ContextTokens", "GeneratedTokens")


def read_trace(path: Path) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each request. Raises BadRequest naming the file, and the line where one is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read the trace {path}: {error}", param="trace") from error
    as_json = next((line for line in lines if line.strip()), "").lstrip().startswith("{")
    rows = _json_rows(path, lines) if as_json else _csv_rows(path, lines)
    if not rows:
        raise BadRequest(f"the trace {path} holds no request", param="trace")
    return rows


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _json_rows(path: Path, lines: Sequence[str]) -> list[tuple[int, int]]:
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append(_pair(row[MOONCAKE[0]], row[MOONCAKE[1]]))
        except (ValueError, KeyError, TypeError):
            raise _wrong(path, number, MOONCAKE) from None
    return rows


def _csv_rows(path: Path, lines: Sequence[str]) -> list[tuple[int, int]]:
    rows = []
    reader = csv.DictReader(lines)
    for row in reader:
        try:
            rows.append(_pair(row[AZURE[0]], row[AZURE[1]]))
        except (ValueError, KeyError, TypeError):
            raise _wrong(path, reader.line_num, AZURE) from None
    return rows


def _pair(prompt: int | str, output: int | str) -> tuple[int, int]:
    pair = int(prompt), int(output)
    if min(pair) < 0:
        raise ValueError(pair)
    return pair


def _wrong(path: Path, number: int, names: Sequence[str]) -> BadRequest:
    return BadRequest(f"{path}, line {number}: no whole numbers {' and '.join(names)}", param="trace")
