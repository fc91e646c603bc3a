"""What has to do with grammars and takes time, off the engine's loop: compiling, and the masks of a step.

    prepare(sequence) ── pool: compile, replay what the client has, first mask ──▶ GuideReady, into the loop's inbox
    masks(sequences)  ── threads, while the device computes the step ──▶ RowMasks, when its logits are to be drawn from

A mask needs the token before it. So a step that draws for a sequence with a grammar is launched without its draws; these follow
once the step before it has landed, which is while the device works on this one (`steps.py`).
"""

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from twinflow.contracts.errors import Internal, TwinflowError, Unsupported
from twinflow.engine.sampling import RowMasks
from twinflow.engine.sequence import Phase, Sequence
from twinflow.grammar.base import Compiler, Row, words_of
from twinflow.grammar.guide import Guide

T = TypeVar("T")

log = logging.getLogger(__name__)

ROWS_PER_THREAD = 16  # fewer are not worth a thread


@dataclass(frozen=True, slots=True)
class GuideReady:
    """Of this very sequence: its id may have come back meanwhile."""

    id: str
    sequence: Sequence
    made: Guide | TwinflowError

    def result(self) -> Guide:
        """Raises why there is none."""
        if isinstance(self.made, TwinflowError):
            raise self.made
        return self.made


class MaskJob:
    """The masks of one step, being computed. Guides in it belong to the job until `result` has returned."""

    def __init__(self, rows: Seq[int], bits: torch.Tensor, parts: Seq["Future[None]"]) -> None:
        self._rows = rows
        self._bits = bits
        self._parts = parts

    def result(self) -> RowMasks:
        """Waits. Raises what a defect raised; a guide's own error is in the guide."""
        wait(self._parts)
        for part in self._parts:
            part.result()
        return RowMasks(tuple(self._rows), self._bits)


def in_background(name: str, make: Callable[[], T]) -> "Future[T]":
    """What `make` makes, on a thread of its own that nobody waits for at the end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Guides:
    """Owned by the engine's loop. `compiler` is a future, so that a worker need not wait for it to serve."""

    def __init__(
        self,
        compiler: "Future[Compiler]",
        vocab_size: int,
        eos_token_ids: Seq[int],
        rows: int,
        device: str,
        threads: int,
        done: Callable[[GuideReady], None],
    ) -> None:
        """`rows`: the most that one step draws for. `done` is called from a thread of the pool."""
        self._compiler = compiler
        self._eos_token_ids = tuple(eos_token_ids)
        self._words = words_of(vocab_size)
        self._threads = threads
        self._done = done
        self._bits = torch.zeros(rows, self._words, dtype=torch.int32, pin_memory=device != "cpu")
        self._compiling = ThreadPoolExecutor(max(1, threads // 2), thread_name_prefix="grammar")
        self._masking = ThreadPoolExecutor(threads, thread_name_prefix="mask")

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=True)

    def prepare(self, sequence: Sequence) -> None:
        """For a sequence that has a grammar, in phase COMPILING until `done` is told."""
        sequence.phase = Phase.COMPILING
        self._compiling.submit(self._prepare, sequence, tuple(sequence.generated))

    def masks(self, sequences: Seq[tuple[int, Sequence]]) -> MaskJob | None:
        """Of sequences with a guide, each with its place among those that the step draws for; None without any. One job at a
        time: the step of the one before must have landed."""
        if not sequences:
            return None
        bits = self._bits[: len(sequences)]
        rows = bits.numpy()
        count = min(self._threads, -(-len(sequences) // ROWS_PER_THREAD))
        work = [(s.guide, s.generated, rows[i]) for i, (_, s) in enumerate(sequences)]
        parts = [self._masking.submit(_fill, work[k::count]) for k in range(count)]
        return MaskJob([at for at, _ in sequences], bits, parts)

    def _prepare(self, sequence: Sequence, generated: Seq[int]) -> None:
        made: Guide | TwinflowError
        try:
            made = self._guide(sequence, generated)
        except TwinflowError as e:
            made = e
        except Exception as e:  # the edge of this thread: a defect ends one request
            log.exception("the grammar of request %s could not be prepared", sequence.id)
            made = Internal(f"{type(e).__name__}: {e}")
        self._done(GuideReady(sequence.id, sequence, made))

    def _guide(self, sequence: Sequence, generated: Seq[int]) -> Guide:
        params = sequence.request.sampling
        assert params.grammar is not None
        try:
            compiler = self._compiler.result()
        except TwinflowError as e:
            raise Unsupported(f"no structured outputs here: {e.message}", param=params.grammar.field) from None
        guide = Guide(compiler.compile(params.grammar).start(), params, self._eos_token_ids)
        guide.fill(generated, np.zeros(self._words, dtype=np.int32))  # the first one builds most of what later ones use
        if guide.error is not None:
            raise guide.error
        return guide


def _fill(work: Seq[tuple[Guide | None, Seq[int], Row]]) -> None:
    for guide, generated, row in work:
        assert guide is not None
        guide.fill(generated, row)
