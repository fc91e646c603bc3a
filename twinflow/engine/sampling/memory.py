"""Device memory behind the sampler's rows: records for all, histories and edits for those that need them.

All changes are queued on the current stream, from pinned memory, so that launches before and after see what they should.
The allocator keeps pinned and replaced memory until the stream is past it.
"""

from collections.abc import Sequence

import torch

from twinflow.contracts.requests import SamplingParams
from twinflow.engine.sampling import params as of
from twinflow.kernels.sampling.tables import PROMPT_MARK, WORDS, RowTables

ALIGNMENT = 16  # entries; keeps every history on a boundary for wide loads


class RowMemory:
    """Owned by the sampler. A history costs 2 bytes per vocabulary entry; they and the edits grow by doubling, never shrink."""

    def __init__(self, vocab_size: int, rows: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._rows = rows
        self._device = device
        width = -(-vocab_size // ALIGNMENT) * ALIGNMENT
        self._records = torch.zeros(rows, WORDS, dtype=torch.int64, device=device)
        self._histories = torch.zeros(0, width, dtype=torch.int16, device=device)
        self._edits = torch.zeros(0, dtype=torch.int64, device=device)
        self._free_histories: list[int] = []
        self._history_of: dict[int, int] = {}  # row -> history
        self._edits_of: dict[int, tuple[int, int]] = {}  # row -> (start, words)

    @property
    def tables(self) -> RowTables:
        """As they are now; a later `put` may replace them."""
        return RowTables(self._records, self._histories[:, : self._vocab_size], self._edits)

    def adjusts(self, row: int) -> bool:
        """Whether the row has anything that changes its logits."""
        return row in self._history_of or row in self._edits_of

    def put(self, row: int, params: SamplingParams, prompt: bytes, generated: Sequence[int]) -> None:
        """Fills a row that `clear` has emptied or that is new. Raises ValueError for token ids outside the vocabulary."""
        edits, count = of.edits(params, self._vocab_size)
        history = self._put_history(row, params, prompt, generated) if of.needs_history(params) else -1
        start = self._put_edits(row, edits) if count else 0
        self._records[row].copy_(self.upload(of.record(params, self._vocab_size, history, (start, count))))

    def clear(self, row: int) -> None:
        """The row's history and edits may be reused by what is queued from now on."""
        if row in self._history_of:
            self._free_histories.append(self._history_of.pop(row))
        self._edits_of.pop(row, None)

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """`values` on the device, without waiting."""
        if self._device == "cpu":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)

    def _put_history(self, row: int, params: SamplingParams, prompt: bytes, generated: Sequence[int]) -> int:
        if not self._free_histories:
            have = self._histories.shape[0]
            more = self._histories.new_zeros(min(self._rows, max(4, 2 * have)), self._histories.shape[1])
            more[:have] = self._histories
            self._histories = more
            self._free_histories.extend(range(have, more.shape[0]))
        index = self._history_of[row] = self._free_histories.pop()
        history = self._histories[index]
        history.zero_()
        if params.repetition_penalty != 1.0 and prompt:
            ids = self.upload(torch.frombuffer(bytearray(prompt), dtype=torch.int32))
            history.index_fill_(0, ids.long(), PROMPT_MARK)
        if generated:
            seen, counts = (self.upload(t) for t in of.counted(generated))
            history[seen] = history[seen] | counts
        return index

    def _put_edits(self, row: int, edits: torch.Tensor) -> int:
        """First fit among the spans in use; grows when there is no gap."""
        words = len(edits)
        start = 0
        for used, length in sorted(self._edits_of.values()):
            if used - start >= words:
                break
            start = used + length
        if start + words > len(self._edits):
            more = self._edits.new_zeros(max(2 * len(self._edits), start + words))
            more[: len(self._edits)] = self._edits
            self._edits = more
        self._edits_of[row] = (start, words)
        self._edits[start : start + words] = self.upload(edits)
        return start
