"""States kept from amid a batch's tokens (`base.Snapshots`), for the plain torch kernels."""

from collections.abc import Iterator
from itertools import pairwise

import torch

from twinflow.kernels.base import Snapshots
from twinflow.kernels.varlen import Span


def pieces(span: Span, state_rows: torch.Tensor, snapshots: Snapshots | None) -> Iterator[tuple[slice, torch.Tensor]]:
    """The runs of a sequence's tokens after which its state is stored, each with the rows (1 or 2,) of the pool that get it:
    one ends at each snapshot, the last one at the end. Synchronises with the host."""
    ends, rows = [span.end], state_rows[span.seq : span.seq + 1]
    if snapshots is not None:
        kept = slice(int(snapshots.starts[span.seq]), int(snapshots.starts[span.seq + 1]))
        ends = [*(snapshots.after[kept] + span.start).tolist(), span.end]
        rows = torch.cat([snapshots.rows[kept], rows])
    for i, (start, end) in enumerate(pairwise([span.start, *ends])):
        if start < end:  # of one kept at the end itself the row comes with the last run
            yield slice(start, end), rows[i : i + ends.count(end)]
