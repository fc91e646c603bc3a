"""State pools read and written by row index; row -1 means padding: reads as zero, is never written."""

import torch


def load_rows(pool: torch.Tensor, rows: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """Copies `pool[rows]` to fp32, with zeros where `fresh` is True or the row is -1, whatever lies there (also NaN).

    pool (R, *shape) any float dtype and strides; rows (n,) int64; fresh (n,) bool. Returns (n, *shape) contiguous fp32.
    """
    picked = pool.index_select(0, rows.clamp(min=0)).float()
    drop = fresh | (rows < 0)
    return picked.masked_fill_(drop.view(-1, *[1] * (pool.ndim - 1)), 0.0)


def store_rows(pool: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Writes `values` (n, *shape) to `pool[rows]` in place, rounded to the pool's dtype; rows of -1 are skipped.

    rows other than -1 must be distinct. Synchronises with the host on CUDA (a boolean selection).
    """
    keep = rows >= 0
    if not bool(keep.all()):
        rows, values = rows[keep], values[keep]
    pool.index_copy_(0, rows, values.to(pool.dtype))
