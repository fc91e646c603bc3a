"""Steps that a worker with a GPU runs before it serves, so that no request waits for a kernel to be compiled.

Triton compiles a kernel for what a launch is like: how many sequences there are, and tokens (by powers of two, as the kernels
choose their tiles), whether some sequences have a single token, whether states are kept from amid the tokens. What captured
graphs have compiled is not rehearsed.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple


class Rehearsal(NamedTuple):
    """A step of sequences with so many tokens each. `snapshots`: states are kept from amid them; `shared`: its sequences may
    share prefixes."""

    lens: tuple[int, ...]
    snapshots: bool = False
    shared: bool = False


def rehearsals(rows: int, step_tokens: int, chunk_tokens: int, *, decode_captured: bool) -> list[Rehearsal]:
    """For a worker of `rows` sequences, steps of `step_tokens` and chunks of `chunk_tokens`. `decode_captured`: there are graphs
    for batches of one token each."""
    most = min(rows, step_tokens // 2)
    chunks: list[tuple[int, ...]] = [(tokens,) for tokens in doubled(2, min(chunk_tokens, step_tokens))]
    chunks += [(1, *(2,) * (sequences - 1)) for sequences in doubled(2, most)]
    if most > 1 and (fair := step_tokens // most) > 2:
        chunks.append((1, *(fair,) * (most - 1)))
    steps = [Rehearsal(lens, snapshots) for lens in chunks for snapshots in (False, True)]
    if not decode_captured:
        ones = [(1,) * sequences for sequences in doubled(1, rows)]
        steps += [Rehearsal(lens) for lens in ones]
        steps += [Rehearsal(lens, shared=True) for lens in ones if len(lens) > 1]
    return steps


def doubled(first: int, last: int) -> Iterator[int]:
    """first, 2 first, 4 first … below `last`, and `last`; nothing where that is below `first`."""
    if last >= first:
        yield from itertools.takewhile(lambda n: n < last, (first << i for i in itertools.count()))
        yield last
