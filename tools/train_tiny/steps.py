"""What one training step is made of: batches on the device, the loss of a batch, the optimisers' step."""

import itertools
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from tools.train_tiny.mixture import Mixture
from tools.train_tiny.packed import Packing
from tools.train_tiny.rows import Rows


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor  # (rows, tokens) int64
    target: Tensor  # (rows, tokens) int64, -100 where nothing is learned
    position: Tensor  # (rows, tokens) int64


def batches(rows: Rows, rows_per_batch: int, device: str) -> Iterator[Batch]:
    """Full batches only, so that shapes never change."""
    for at in range(0, len(rows) - rows_per_batch + 1, rows_per_batch):
        part = slice(at, at + rows_per_batch)
        ids = torch.from_numpy(rows.ids[part].astype(np.int64))
        target = ids[:, 1:].masked_fill(~torch.from_numpy(rows.learned[part][:, 1:]), -100)
        position = torch.from_numpy(rows.position[part].astype(np.int64))
        yield Batch(*(t.to(device, non_blocking=True) for t in (ids[:, :-1], target, position)))


def endless_batches(mixture: Mixture, rows_per_batch: int, device: str) -> Iterator[tuple[int, Batch]]:
    """(epoch, batch) for ever. The next epoch is built on another thread while the present one trains."""
    ready: queue.Queue[Rows] = queue.Queue(maxsize=1)

    def build() -> None:
        while True:
            ready.put(mixture.next_epoch())

    threading.Thread(target=build, daemon=True).start()
    for epoch in itertools.count(1):
        for batch in batches(ready.get(), rows_per_batch, device):
            yield epoch, batch


def learned_logits(model: Qwen3_5ForCausalLM, packing: Packing, batch: Batch, device: str) -> tuple[Tensor, Tensor]:
    """(targets, vocabulary) fp32 logits and the targets, for learned targets only."""
    packing.position = batch.position
    mask = {"full_attention": packing.attention_mask(), "linear_attention": None}
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):  # few CPUs gain by bf16
        hidden = model.model(input_ids=batch.ids, attention_mask=mask, position_ids=batch.position, use_cache=False)[0]
        hidden, target = hidden.flatten(0, 1), batch.target.flatten()
        kept = torch.nonzero(target >= 0).flatten()
        logits = model.lm_head(hidden[kept])
    return logits.float(), target[kept]


def loss_of(model: Qwen3_5ForCausalLM, packing: Packing, batch: Batch, device: str) -> Tensor:
    """Mean nats over the learned targets of a batch."""
    return F.cross_entropy(*learned_logits(model, packing, batch, device))


@torch.no_grad()
def held_out_loss(
    model: Qwen3_5ForCausalLM, packing: Packing, rows: Rows, rows_per_batch: int, device: str, most: int
) -> float:
    """Mean nats over at most `most` batches."""
    model.eval()
    total, count = 0.0, 0
    for batch in itertools.islice(batches(rows, rows_per_batch, device), most):
        learned = int((batch.target >= 0).sum())
        total += loss_of(model, packing, batch, device).item() * learned
        count += learned
    model.train()
    return total / max(count, 1)


def step_all(model: Qwen3_5ForCausalLM, optimizers: list[torch.optim.Optimizer]) -> None:
    """One step along the gradients that are there, clipped, and no gradients after it."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
