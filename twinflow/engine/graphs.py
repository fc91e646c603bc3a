"""Forward passes captured as CUDA graphs, for the sizes of steps where launching kernels one by one would be the slow part.

A graph reads its inputs from a buffer of its own and is replayed on any step that fits its shape; the rest of the shape is
padding. Decoding has a ladder of batch sizes. Prefill has one of token counts, with room for a few sequences: above its
last rung the GPU takes longer for a pass than the host does to launch it.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from twinflow.engine.batch import Fields, Plan, Shape
from twinflow.kernels.paged_attention.shared import SharedPrefixes

log = logging.getLogger(__name__)

PREFILL_TOKENS = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
PREFILL_SEQUENCES = 8  # one of them for padding, unless the tokens fill the rung
WASTE = 1.5  # a step is not padded beyond this multiple of its tokens, except to the first rung


class Forward(Protocol):
    def __call__(
        self,
        fields: Fields[torch.Tensor],
        shape: Shape,
        lens: tuple[int, ...],
        shared: SharedPrefixes | None,
        snapshots: bool,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Captured:
    """`logits` (B, vocab) hold the result after `graph.replay()`, until the next replay of any graph of the set. `shared`
    is to be filled too, where it is there."""

    shape: Shape
    buffer: torch.Tensor
    fields: Fields[torch.Tensor]  # of it
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    shared: SharedPrefixes | None


class StepGraphs:
    """Graphs share one pool of memory: they run one after another on one stream. Decode batches that may share prefixes have
    two each: the one that looks for shared ones is slower where there are none."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._decode: dict[int, Captured] = {}
        self._sharing: dict[int, Captured] = {}
        self._prefill: dict[int, Captured] = {}
        self._rungs: list[int] = []

    def rung(self, sequences: int) -> int:
        """The batch size that a decode step of so many sequences is padded to."""
        return next((n for n in self._rungs if n >= sequences), sequences)

    def fit(self, plan: Plan, *, shared: bool) -> Captured | None:
        """The smallest graph that the step fits into."""
        tokens, sequences = plan.shape.tokens, plan.shape.sequences
        if plan.decode_only:
            return (self._sharing if shared else self._decode).get(self.rung(sequences))
        found = next((n for n in self._prefill if n >= tokens), None)
        if found is None or (found > WASTE * tokens and found != PREFILL_TOKENS[0]):
            return None
        return self._prefill[found] if sequences + (found > tokens) <= PREFILL_SEQUENCES else None

    def capture(
        self, forward: Forward, padding: Callable[[Shape, torch.Tensor], None], shapes: Iterable[Shape]
    ) -> None:
        """Captures `forward` for each shape. `padding` fills a buffer with a step of nothing but padding, so that the
        passes run here, to compile what they need, write nowhere."""
        began = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        ordered = sorted(shapes, key=lambda s: (s.sequences, s.tokens))
        self._rungs = [s.tokens for s in ordered if s.is_decode]
        logits: torch.Tensor | None = None

        def captured(shape: Shape, shared: SharedPrefixes | None) -> Captured:
            nonlocal logits
            buffer = torch.empty(shape.size_bytes, dtype=torch.uint8, device=self.device)
            padding(shape, buffer)
            fields = Fields.of(buffer, shape)
            lens = (1,) * shape.sequences
            if not shape.is_decode:  # ready for both kinds of sequences
                lens = (1, shape.tokens - 1, *(0,) * (shape.sequences - 2))
            out = forward(fields, shape, lens, shared, not shape.is_decode)
            if logits is None:
                logits = torch.empty_like(out)
            view = logits[: shape.sequences]
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                forward(fields, shape, lens, shared, not shape.is_decode, out=view)
            return Captured(shape, buffer, fields, graph, view, shared)

        for shape in reversed(ordered):  # the largest first: the others fit into its memory
            if not shape.is_decode:
                self._prefill[shape.tokens] = captured(shape, None)
                continue
            self._decode[shape.tokens] = captured(shape, None)
            if shape.tokens > 1:
                none = SharedPrefixes.none(shape.sequences, self.device)
                self._sharing[shape.tokens] = captured(shape, none)
        self._prefill = dict(sorted(self._prefill.items()))
        log.info(
            "captured %d decode and %d prefill graphs in %.1f s",
            len(self._decode) + len(self._sharing),
            len(self._prefill),
            time.monotonic() - began,
        )


def decode_ladder(rows: int) -> list[int]:
    """Batch sizes with graphs, up to `rows`: a step is padded by at most a quarter, above 8 sequences."""
    sizes = [1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *range(320, 1025, 64)]
    return sorted({*(n for n in sizes if n < rows), rows})


def step_shapes(rows: int, step_tokens: int, *, decodes: bool) -> list[Shape]:
    """What is captured for a worker of `rows` sequences and steps of `step_tokens`; without decoding only prefill."""
    shapes = [Shape(n, PREFILL_SEQUENCES) for n in PREFILL_TOKENS if n <= step_tokens]
    return [*shapes, *(Shape(n, n) for n in decode_ladder(rows))] if decodes else shapes
