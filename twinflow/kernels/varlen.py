"""How a packed batch splits: sequences with one token take batched one-token paths, longer ones chunked paths.

Host arithmetic on `seq_lens`, so that no kernel has to read a length back from the device.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start..end-1` of the packed batch belong to sequence `seq`."""

    seq: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Split:
    """`single`: sequences with exactly one token; `longer`: with more. Sequences without tokens appear in neither."""

    single: tuple[Span, ...]
    longer: tuple[Span, ...]

    @property
    def all_single(self) -> bool:
        """Every sequence has at most one token."""
        return not self.longer


def split_batch(seq_lens: tuple[int, ...]) -> Split:
    """Splits a packed batch by the host's copy of its lengths."""
    single, longer = [], []
    start = 0
    for seq, tokens in enumerate(seq_lens):
        span = Span(seq, start, start + tokens)
        start = span.end
        if tokens == 1:
            single.append(span)
        elif tokens > 1:
            longer.append(span)
    return Split(tuple(single), tuple(longer))


def single_indices(split: Split, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequence, token) indices of the one-token sequences, each (n,) int64 on `device`."""
    seqs = torch.tensor([s.seq for s in split.single], dtype=torch.int64, device=device)
    tokens = torch.tensor([s.start for s in split.single], dtype=torch.int64, device=device)
    return seqs, tokens
