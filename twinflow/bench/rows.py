"""What is measured: prompts computed from nothing, or one token each for many running sequences."""

import re
from dataclasses import dataclass

from twinflow.contracts.errors import BadRequest

PATTERN = re.compile(r"(prefill):(\d+)x(\d+)|(decode):(\d+)@(\d+)")
STANDARD = (
    "prefill:1x1024,prefill:1x4096,prefill:1x16384,prefill:1x32768,prefill:32x4096,"
    "decode:1@1024,decode:8@1024,decode:32@1024,decode:64@1024,decode:128@1024,decode:256@1024,decode:32@8192,decode:8@32768"
)


@dataclass(frozen=True, slots=True)
class Row:
    """prefill: `batch` prompts of `tokens` tokens each, until every one has its first token. decode: `batch` sequences with
    `tokens` tokens each behind them, a token more for each per step."""

    kind: str  # "prefill" or "decode"
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.batch}{'x' if self.kind == 'prefill' else '@'}{self.tokens}"


def parse_rows(text: str) -> tuple[Row, ...]:
    """From `prefill:1x1024,decode:8@1024`. Raises BadRequest for anything else, and for zeros."""
    rows = []
    for part in text.split(","):
        match = PATTERN.fullmatch(part.strip())
        if match is None:
            raise BadRequest(
                f"row {part.strip()!r} is neither prefill:BATCHxTOKENS nor decode:BATCH@TOKENS", param="rows"
            )
        kind, batch, tokens = (value for value in match.groups() if value is not None)
        if not int(batch) or not int(tokens):
            raise BadRequest(f"row {part.strip()!r}: batch and tokens must be at least 1", param="rows")
        rows.append(Row(kind, int(batch), int(tokens)))
    return tuple(rows)
