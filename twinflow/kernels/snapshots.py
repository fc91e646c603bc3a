"""States kept from amid a batch's tokens (`base.Snapshots`), for the plain torch kernels."""

from collections.abc import Iterator

import torch

from twinflow.kernels.base import Snapshots
from twinflow.kernels.varlen import Span


def pieces(span: Span, state_rows: torch.Tensor, snapshots: Snapshots | None) -> Iterator[tuple[slice, torch.Tensor]]:
    """The runs of a sequence's tokens after which its state is stored, each with the row (1,) of the pool that gets it: one
    that ends at the snapshot, where there is one, and the rest. Synchronises with the host."""
    start, own = span.start, slice(span.seq, span.seq + 1)
    if snapshots is not None and int(snapshots.rows[span.seq]) >= 0:
        start += int(snapshots.after[span.seq])
        yield slice(span.start, start), snapshots.rows[own]
    yield slice(start, span.end), state_rows[own]
