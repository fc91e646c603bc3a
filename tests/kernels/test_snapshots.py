"""States kept from amid a batch: the same as those of a batch that ends there, and nothing else changes."""

from collections.abc import Callable
from importlib import import_module

import pytest
import torch

from tests.kernels.varlen import bools, cu, relative_error, rows
from twinflow.kernels.base import Snapshots

OPS = {
    "conv": ("causal_conv1d", "causal_conv1d"),
    "delta": ("gated_delta_rule", "gated_delta"),
    "ssd": ("mamba2_ssd", "mamba2_ssd"),
}
LENS, OWN, FRESH = (1, 66, 3, 130, 0), rows(6, 0, 3, 9, 2), bools(False, False, True, True, False)
KEPT, AFTER = rows(-1, 4, -1, 7, -1), (0, 64, 0, 128, 0)


def load(op: str, version: str) -> Callable[..., torch.Tensor]:
    """The operation in plain torch or in Triton, where that is installed."""
    if version == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    folder, name = OPS[op]
    return getattr(import_module(f"twinflow.kernels.{folder}.{version}"), name)


def case(op: str, lens: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What comes before the state in the arguments, for sequences with their own seeds, and a pool of 10 rows."""
    k, v = (16, 24) if device == "cpu" else (128, 128)

    def packed(*shape: int) -> torch.Tensor:
        pieces = [
            torch.randn(max(LENS), *shape, generator=torch.Generator().manual_seed(i))[:n] for i, n in enumerate(lens)
        ]
        return torch.cat(pieces).to(dtype).to(device)

    torch.manual_seed(0)
    if op == "conv":
        before = [packed(40), torch.randn(40, 4), torch.randn(40)]
        shape = (40, 3)
    elif op == "delta":
        before = [packed(1, k), packed(1, k), packed(2, v), packed(2), packed(2), torch.rand(2), torch.randn(2)]
        shape = (2, v, k)
    else:
        before = [packed(4, v), packed(2, k), packed(2, k), packed(4), torch.rand(4), torch.randn(4), torch.randn(4)]
        shape = (4, v, k)
    return [x.to(device) for x in before], torch.randn(10, *shape).to(device)


def run(f: Callable[..., torch.Tensor], op: str, lens: tuple[int, ...], dtype, device: str, kept=None, after=AFTER):
    """Output and pool."""
    before, pool = case(op, lens, dtype, device)
    snapshots = (
        Snapshots(kept.to(device), torch.tensor(after, dtype=torch.int32, device=device)) if kept is not None else None
    )
    where = (OWN.to(device), FRESH.to(device), cu(lens).to(device), lens)
    return f(*before, pool, *where, snapshots=snapshots), pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("version", ["reference", "triton"])
@pytest.mark.parametrize("op", OPS)
def test_equals_a_batch_that_ends_there(op: str, version: str, dtype: torch.dtype, device: str) -> None:
    f = load(op, version)
    # Chunks are the same with and without; the reference rounds half types where it splits.
    tolerance = 1e-3 if version == "reference" and dtype == torch.float16 else 1e-6
    out, pool = run(f, op, LENS, dtype, device, KEPT)
    whole, expected = run(f, op, LENS, dtype, device)
    _, ended = run(f, op, tuple(a or n for n, a in zip(LENS, AFTER, strict=True)), dtype, device)
    assert relative_error(out, whole) < tolerance
    for own, row in zip(OWN.tolist(), KEPT.tolist(), strict=True):
        assert relative_error(pool[own], expected[own]) < tolerance
        if row >= 0:
            assert relative_error(pool[row], ended[own]) < tolerance
    untouched = [r for r in range(10) if r not in OWN.tolist() + KEPT.tolist()]
    assert pool[untouched].equal(expected[untouched])


@pytest.mark.parametrize("version", ["reference", "triton"])
@pytest.mark.parametrize("after", [1, 2, 3, 65])
def test_a_convolution_keeps_any_token(after: int, version: str, device: str) -> None:
    f, kept = load("conv", version), rows(-1, 4, -1, -1, -1)
    _, pool = run(f, "conv", LENS, torch.float32, device, kept, (0, after, 0, 0, 0))
    _, ended = run(f, "conv", (1, after, *LENS[2:]), torch.float32, device)
    assert pool[4].equal(ended[0])
