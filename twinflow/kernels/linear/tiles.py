"""How few-token projections are cut into programs. Pure; the rules come from measurements (docs/performance.md).

Such a projection is a walk over the weights. It takes what reading them takes if all multiprocessors read as much as each
other and enough is on its way, so the rows are dealt out evenly, two programs to a multiprocessor. A matrix of fewer rows
than that is cut along its columns too, into parts that are summed up later.
"""

from dataclasses import dataclass

MAX_TOKENS = 64  # beyond, the library's products are as fast or faster; for few and long rows, beyond twice as many
ROWS = 64  # the matrix unit's
PROGRAMS = 2  # at once on a multiprocessor


@dataclass(frozen=True, slots=True)
class Tile:
    """A program: `rows` rows of the weights out of `padded` that the matrix unit takes, for `tokens` tokens, `inner`
    columns at a time, `stages` such pieces on their way or in use. `parts`: programs that share a row."""

    rows: int
    padded: int
    tokens: int
    inner: int
    stages: int
    warps: int
    parts: int = 1


def choose_tile(
    tokens: int,
    rows: int,
    inner: int,
    *,
    gated: bool,
    partial: bool,
    multiprocessors: int,
    shared_bytes: int,
) -> Tile | None:
    """For `tokens` tokens and half-precision weights (rows, inner), two such matrices if `gated`. `partial`: parts may be
    left to be summed up by somebody else. None: better left to the library."""
    most = 2 * MAX_TOKENS if partial and inner >= 3 * rows else MAX_TOKENS
    if not 0 < tokens <= most or inner % 128:
        return None
    tiles = -(-rows // ROWS)
    parts = max(1, min(multiprocessors // tiles, inner // 512)) if partial else 1
    programs = PROGRAMS if parts == 1 else 1
    width = max(16, power_of_2(tokens))
    room = shared_bytes // programs - 1024  # what the driver keeps of each program's
    step = 128 if tokens <= 32 or parts > 1 else 64
    stages = room // ((ROWS * (1 + gated) + width) * step * 2)
    if stages < 3 and step == 128:
        step, stages = 64, room // ((ROWS * (1 + gated) + width) * 64 * 2)
    if stages < 2:
        return None
    own = ROWS if parts > 1 else min(ROWS, max(16, -(-rows // (PROGRAMS * multiprocessors))))
    return Tile(own, ROWS, width, step, min(6, stages), 4, parts)


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
