"""Draws one token per row of a step's logits, on the device, without waiting for it.

The sampler's rows are those of the engine's persistent tables: a sequence takes one with its parameters, and each launch
names the rows it draws for. Everything runs on the current stream, which must be the same one every time.
"""

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from twinflow.contracts.requests import SamplingParams
from twinflow.engine.sampling import params as of
from twinflow.engine.sampling.base import Draw, Logprobs, RowMasks
from twinflow.engine.sampling.masks import masked
from twinflow.engine.sampling.memory import RowMemory
from twinflow.kernels.base import KernelSet
from twinflow.kernels.sampling.tables import MAX_VOCAB, Needs


class Sampler:
    """Owned by the engine's loop. Sampling = f(seed, sample index, position), whatever else is in the batch.

    What a request has generated is counted on the device by the launches themselves, so a launch may be queued before the
    host knows the tokens of the one before it.
    """

    def __init__(self, vocab_size: int, rows: int, device: str, kernels: KernelSet) -> None:
        """Raises ValueError for a vocabulary that the kernels' integer weights cannot sum up."""
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab_size} is more than sampling can handle ({MAX_VOCAB})")
        self._vocab_size = vocab_size
        self._device = device
        self._kernels = kernels
        self._memory = RowMemory(vocab_size, rows, device)
        self._hashers: dict[int, hashlib.blake2b | None] = {}  # of the rows in use; None = greedy
        self._drawing: set[int] = set()  # rows with a temperature
        self._thresholds: set[int] = set()  # rows with top-k or top-p
        self._adjusting: set[int] = set()  # rows with penalties, biases or banned ids
        self._tops: dict[int, int] = {}  # rows that want log-probabilities -> of how many best tokens besides

    def start(self, row: int, params: SamplingParams, prompt: bytes, generated: Sequence[int]) -> None:
        """A sequence takes a free `row`: packed uint32 `prompt`, `generated` so far (forced tokens included).

        Queues its parameters on the stream; waits for nothing. Raises ValueError for a row in use and for token ids outside
        the vocabulary in the bias or the ending ids; the row stays free then.
        """
        if row in self._hashers:
            raise ValueError(f"row {row} belongs to a running sequence")
        try:
            self._memory.put(row, params, prompt, generated)
        except BaseException:
            self._memory.clear(row)
            raise
        drawing = params.temperature > 0.0
        self._hashers[row] = of.hasher(params.seed, params.sample_index) if drawing else None
        if drawing:
            self._drawing.add(row)
        if of.needs_threshold(params):
            self._thresholds.add(row)
        if self._memory.adjusts(row):
            self._adjusting.add(row)
        if params.logprobs is not None:
            self._tops[row] = min(params.logprobs, self._vocab_size)

    def stop(self, row: int) -> None:
        """The sequence leaves; launches that are queued already are not disturbed. A free row is left alone."""
        if row in self._hashers:
            del self._hashers[row]
            self._memory.clear(row)
            self._drawing.discard(row)
            self._thresholds.discard(row)
            self._adjusting.discard(row)
            self._tops.pop(row, None)

    def launch(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        masks: RowMasks | None = None,
    ) -> Draw:
        """Queues one token for each of logits (n, V), any float dtype; waits for nothing.

        Where `masks` says so only of what it allows; log-probabilities are under the logits as they are, all the same.
        `masks.bits` must not be written before the stream is past this launch.

        rows: n distinct rows in use; positions: tokens generated before this one, each. logits must not be written before the
        stream is past this launch. Raises ValueError for a shape that does not fit, KeyError for a free row.
        """
        if logits.shape != (len(rows), self._vocab_size) or len(rows) != len(positions):
            raise ValueError(
                f"logits {tuple(logits.shape)} for {len(rows)} rows, {len(positions)} positions and {self._vocab_size} ids"
            )
        hashers = self._hashers
        bits = [0 if (h := hashers[row]) is None else of.uniform_bits(h, at) for row, at in zip(rows, positions)]
        steps = self._memory.upload(torch.from_numpy(np.asarray(array("q", [*rows, *positions, *bits]))))
        needs = Needs(*(not some.isdisjoint(rows) for some in (self._drawing, self._thresholds, self._adjusting)))
        allowed = logits if masks is None else self._masked(logits, masks)
        out = self._kernels.sample_tokens(allowed, self._memory.tables, steps.view(3, len(rows)), needs)
        asked = {} if self._tops.keys().isdisjoint(rows) else self._asked(rows)
        logprobs = self._launch_logprobs(logits, out[0], asked) if asked else None
        return Draw(out[0], self._download(out), logprobs)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles what rows may ask for, for logits of `dtype`, so that no request waits for it. Before rows are in use."""
        if self._device == "cpu":
            return
        logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
        everything = torch.full((1, -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        for changes in ({}, {"frequency_penalty": 1.0}):
            for filters in (
                {"temperature": 0.0, "logprobs": 1},
                {"temperature": 1.0},
                {"temperature": 1.0, "top_p": 0.5},
            ):
                self.start(0, SamplingParams(max_tokens=1, seed=0, **changes, **filters), b"", [])  # type: ignore[arg-type]
                self.launch(logits, [0], [0], RowMasks((0,), everything))
                self.stop(0)

    def _masked(self, logits: torch.Tensor, masks: RowMasks) -> torch.Tensor:
        picks = torch.tensor(masks.picks, dtype=torch.int64)
        return masked(logits, self._memory.upload(picks), self._memory.upload(masks.bits))

    def _launch_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, tops: dict[int, int]) -> Logprobs:
        picks = self._memory.upload(torch.tensor(list(tops), dtype=torch.int64))
        values, ids = self._kernels.token_logprobs(logits, picks, tokens, max(tops.values()))
        lines = {index: (line, top) for line, (index, top) in enumerate(tops.items())}
        return Logprobs(self._download(values), self._download(ids), lines)

    def _asked(self, rows: Sequence[int]) -> dict[int, int]:
        """Index in the batch -> how many best tokens besides, for the rows that want log-probabilities."""
        return {i: self._tops[row] for i, row in enumerate(rows) if row in self._tops}

    def _download(self, values: torch.Tensor) -> torch.Tensor:
        """A host copy that is there when the stream has passed this point."""
        if self._device == "cpu":
            return values
        return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
