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
LENS, OWN, FRESH = (1, 66, 3, 130, 64, 0), rows(6, -1, 3, 9, 2, 11), bools(False, False, True, True, False, False)
# By sequence: tokens after which a state is kept, and its row. Of the first with any nothing else is stored.
KEPT = ({}, {64: 4}, {}, {64: 7, 128: 1}, {64: 5}, {})
ROWS = 16
Kept = tuple[dict[int, int], ...]


def load(op: str, version: str) -> Callable[..., torch.Tensor]:
    """The operation in plain torch or in Triton, where that is installed."""
    if version == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    folder, name = OPS[op]
    return getattr(import_module(f"twinflow.kernels.{folder}.{version}"), name)


def case(op: str, lens: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What comes before the state in the arguments, for sequences with their own seeds, and a pool of states."""
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
    return [x.to(device) for x in before], torch.randn(ROWS, *shape).to(device)


def snapshots_of(kept: Kept, device: str) -> Snapshots:
    """In one list; what lies behind it names rows that nobody else writes."""
    after, into = [a for one in kept for a in one], [r for one in kept for r in one.values()]
    return Snapshots(
        cu([len(one) for one in kept]).to(device),
        torch.tensor([*after, 64, 0], dtype=torch.int32, device=device),
        torch.tensor([*into, 10, 14], device=device),
    )


def run(f: Callable[..., torch.Tensor], op: str, lens: tuple[int, ...], dtype, device: str, kept: Kept | None = None):
    """Output and pool."""
    before, pool = case(op, lens, dtype, device)
    where = (OWN.to(device), FRESH.to(device), cu(lens).to(device), lens)
    return f(*before, pool, *where, snapshots=None if kept is None else snapshots_of(kept, device)), pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("version", ["reference", "triton"])
@pytest.mark.parametrize("op", OPS)
def test_equals_batches_that_end_there(op: str, version: str, dtype: torch.dtype, device: str) -> None:
    f = load(op, version)
    # Chunks are the same with and without; the reference rounds half types where it splits.
    tolerance = 1e-3 if version == "reference" and dtype == torch.float16 else 1e-6
    out, pool = run(f, op, LENS, dtype, device, KEPT)
    whole, expected = run(f, op, LENS, dtype, device)
    assert relative_error(out, whole) < tolerance
    written = set()
    for seq, (own, kept) in enumerate(zip(OWN.tolist(), KEPT, strict=True)):
        if own >= 0:
            written.add(own)
            assert relative_error(pool[own], expected[own]) < tolerance
        for after, row in kept.items():
            ended = stopped(f, op, seq, after, dtype, device)
            assert relative_error(pool[row], ended) < tolerance, (seq, after)
            written.add(row)
    untouched = [r for r in range(ROWS) if r not in written]
    assert pool[untouched].equal(expected[untouched])


def stopped(f: Callable[..., torch.Tensor], op: str, seq: int, after: int, dtype, device: str) -> torch.Tensor:
    """The state of a sequence in a batch in which it alone has tokens, `after` of them."""
    lens = tuple(after if i == seq else 0 for i in range(len(LENS)))
    before, pool = case(op, lens, dtype, device)
    own = OWN.clone()
    if own[seq] < 0:  # without one of its own, what lay there is what row -1 reads as: nothing
        own[seq], pool[15] = 15, 0
    f(*before, pool, own.to(device), FRESH.to(device), cu(lens).to(device), lens)
    return pool[int(own[seq])]


@pytest.mark.parametrize("version", ["reference", "triton"])
@pytest.mark.parametrize("after", [1, 2, 3, 65])
def test_a_convolution_keeps_any_token(after: int, version: str, device: str) -> None:
    f, kept = load("conv", version), ({}, {after: 4, 66: 5}, *({} for _ in LENS[2:]))
    _, pool = run(f, "conv", LENS, torch.float32, device, kept)
    assert pool[4].equal(stopped(f, "conv", 1, after, torch.float32, device))
    assert pool[5].equal(stopped(f, "conv", 1, 66, torch.float32, device))
