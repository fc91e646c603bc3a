"""From a step plan to a `ForwardBatch`: persistent block tables, packed ids, where K/V go, which rows need logits."""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from twinflow.cache.arena import ArenaGeometry
from twinflow.engine.sequence import Sequence
from twinflow.models.base import ForwardBatch


class BlockTables:
    """One row per running sequence, changed when a sequence starts or ends, never rebuilt per step.

    Rows beyond a sequence's blocks hold -1.
    """

    def __init__(self, rows: int, blocks: int, device: str) -> None:
        self.table = torch.full((rows, blocks), -1, dtype=torch.int32, device=device)
        self._free = list(range(rows - 1, -1, -1))

    def assign(self, sequence: Sequence) -> None:
        """Gives the sequence a row with its reserved blocks."""
        assert sequence.holding is not None and sequence.row is None
        row = self._free.pop()
        blocks = torch.tensor(sequence.holding.blocks, dtype=torch.int32)
        self.table[row, : blocks.numel()] = blocks.to(self.table.device)
        sequence.row = row

    def extend(self, sequence: Sequence, had: int) -> None:
        """The sequence's holding has grown from `had` blocks."""
        assert sequence.holding is not None and sequence.row is not None
        blocks = torch.tensor(sequence.holding.blocks[had:], dtype=torch.int32)
        self.table[sequence.row, had : had + blocks.numel()] = blocks.to(self.table.device)

    def free(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self.table[sequence.row].fill_(-1)
            self._free.append(sequence.row)
            sequence.row = None


def build_batch(
    parts: Seq[tuple[Sequence, int]], tables: BlockTables, geometry: ArenaGeometry, device: str
) -> tuple[ForwardBatch, list[Sequence]]:
    """The batch that feeds `tokens` more tokens of each sequence, and the sequences whose next token it decides.

    Call before the cache's `advance`: KV of positions below `written_tokens` is there and not written again.
    """
    ids, positions, kv_slots, lens = [], [], [], []
    logit_rows: list[int] = []
    sampled: list[Sequence] = []
    at = 0
    for sequence, tokens in parts:
        holding, chain = sequence.holding, sequence.chain
        assert holding is not None
        start, end, bt = holding.position, holding.position + tokens, chain.block_tokens
        ids.append(np.frombuffer(chain.packed(start, end), dtype=np.uint32).astype(np.int64))
        where = np.arange(start, end, dtype=np.int64)
        positions.append(where)
        first = start // bt
        blocks = np.asarray(holding.blocks[first : (end - 1) // bt + 1], dtype=np.int64)
        slots = blocks[where // bt - first] * bt + where % bt
        slots[where < holding.written_tokens] = -1
        kv_slots.append(slots)
        lens.append(tokens)
        at += tokens
        if end == len(chain):
            logit_rows.append(at - 1)
            sampled.append(sequence)
    starts = [s.holding.position for s, _ in parts if s.holding is not None]
    context = [p + n for p, n in zip(starts, lens, strict=True)]
    width = (max(context) - 1) // parts[0][0].chain.block_tokens + 1
    rows = torch.tensor([s.row for s, _ in parts], dtype=torch.int64)
    state_rows = [geometry.slot_row(s.holding.slot) for s, _ in parts if s.holding and s.holding.slot is not None]

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    batch = ForwardBatch(
        input_ids=on_device(np.concatenate(ids)),
        positions=on_device(np.concatenate(positions)),
        cu_seqlens=on_device(np.concatenate(([0], np.cumsum(lens))).astype(np.int32)),
        seq_lens=tuple(lens),
        context_lens=on_device(np.asarray(context, dtype=np.int32)),
        block_tables=tables.table[rows.to(device), :width],
        kv_slots=on_device(np.concatenate(kv_slots)),
        state_rows=on_device(np.asarray(state_rows, dtype=np.int64)),
        fresh=on_device(np.asarray(starts) == 0),
        logit_rows=on_device(np.asarray(logit_rows, dtype=np.int64)),
    )
    return batch, sampled
