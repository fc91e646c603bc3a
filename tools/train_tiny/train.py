"""Trains the model for a given number of minutes and leaves bf16 weights, config and the loss curve in a folder.

    python -m tools.train_tiny.train --corpus DIR --tokenizer MODEL_DIR --out DIR --minutes 8

Master weights and optimiser state are fp32, arithmetic is bf16 autocast. The last step writes the weights as stored
(bf16), reads them back and measures the held-out loss on those.
"""

import argparse
import csv
import itertools
import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from tools.train_tiny import packed, recurrence, schedule
from tools.train_tiny.mixture import Amounts, Mixture
from tools.train_tiny.model import make_config, save_model
from tools.train_tiny.rows import Rows

COLUMNS = ("step", "seconds", "tokens", "epochs", "rate", "train_loss", "held_out_books_loss", "held_out_chats_loss")


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


def loss_of(model: Qwen3_5ForCausalLM, packing: packed.Packing, batch: Batch, device: str) -> Tensor:
    """Mean nats over the learned targets of a batch."""
    packing.position = batch.position
    mask = {"full_attention": packing.attention_mask(), "linear_attention": None}
    with torch.autocast(device, torch.bfloat16):
        hidden = model.model(input_ids=batch.ids, attention_mask=mask, position_ids=batch.position, use_cache=False)[0]
        hidden, target = hidden.flatten(0, 1), batch.target.flatten()
        kept = torch.nonzero(target >= 0).flatten()  # no logits where nothing is learned
        logits = model.lm_head(hidden[kept])
    return F.cross_entropy(logits.float(), target[kept])


@torch.no_grad()
def held_out_loss(
    model: Qwen3_5ForCausalLM, packing: packed.Packing, rows: Rows, n: int, device: str, most: int
) -> float:
    """Mean nats over at most `most` batches of `n` rows."""
    model.eval()
    total, count = 0.0, 0
    for batch, _ in zip(batches(rows, n, device), range(most), strict=False):
        learned = int((batch.target >= 0).sum())
        total += loss_of(model, packing, batch, device).item() * learned
        count += learned
    model.train()
    return total / max(count, 1)


def compile_parts(model: Qwen3_5ForCausalLM) -> None:
    """Norms and MLPs are chains of small operations; the rest is one kernel each already."""
    for module in model.modules():
        if isinstance(module, (modeling.Qwen3_5RMSNorm, modeling.Qwen3_5RMSNormGated, modeling.Qwen3_5MLP)):
            module.compile(dynamic=False)


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    amounts = Amounts(**json.loads(args.amounts))
    mixture = Mixture(args.corpus, tokenizer, args.row_tokens, amounts)
    print(f"data ready after {time.monotonic() - started:.0f} s", flush=True)

    model = Qwen3_5ForCausalLM(make_config(tokenizer)).to(device)
    schedule.prepare(model, args.dropout)
    packing = packed.Packing(torch.zeros(0))
    rule_name, rule = recurrence.pick(device)
    packed.install(packing, rule, compile_convolution=args.compile)
    if args.compile:
        compile_parts(model)
    optimizers = schedule.optimizers(model, args.rate, args.weight_decay)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, rule: {rule_name}", flush=True)

    held_out = (mixture.held_out_books, mixture.held_out_chats)
    budget_s, clock, report_at, tokens, recent = args.minutes * 60, 0.0, 0.0, 0, []  # type: ignore[var-annotated]
    log = CurveLog(args.out / "loss.csv")
    for step, (epoch, batch) in enumerate(endless_batches(mixture, args.rows, device)):
        if step == args.untimed_steps:  # compilation and autotuning stay out of the schedule
            clock = time.monotonic()
        elapsed = time.monotonic() - clock if step >= args.untimed_steps else 0.0
        if elapsed >= budget_s or step == args.max_steps:
            break
        schedule.set_rate(optimizers, args.rate, elapsed / budget_s)
        loss = loss_of(model, packing, batch, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += batch.ids.numel()
        recent.append(loss.detach())
        if len(recent) == args.log_every:
            held: list[float] = []
            if elapsed >= report_at:
                report_at += budget_s / 20
                held = [held_out_loss(model, packing, rows, args.rows, device, 4) for rows in held_out]
            rate = args.rate * schedule.rate(elapsed / budget_s)
            log.write(step + 1, elapsed, tokens, epoch, rate, torch.stack(recent).mean().item(), held)
            recent = []
    log.close()
    seconds = time.monotonic() - clock

    model = model.to(torch.bfloat16)  # what is shipped
    save_model(model, tokenizer, args.out)
    model = model.float()
    held = [held_out_loss(model, packing, rows, args.rows, device, args.held_out_batches) for rows in held_out]
    arguments = {k: v for k, v in vars(args).items() if isinstance(v, (int, float)) and k != "held_out_batches"}
    summary = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "recurrence": rule_name,
        "steps": step,
        "tokens": tokens,
        "epochs": epoch,
        "seconds": round(seconds, 1),
        "held_out_books_loss": round(held[0], 4),
        "held_out_chats_loss": round(held[1], 4),
        "arguments": arguments | {"amounts": asdict(amounts)},
    }
    (args.out / "training.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary), flush=True)


class CurveLog:
    """loss.csv, and on the terminal the lines that carry a held-out loss."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)

    def write(
        self, step: int, seconds: float, tokens: int, epoch: int, rate: float, loss: float, held: Sequence[float]
    ) -> None:
        row = [step, f"{seconds:.1f}", tokens, epoch, f"{rate:.2e}", f"{loss:.4f}", *(f"{h:.4f}" for h in held or ())]
        self._writer.writerow(row + [""] * (len(COLUMNS) - len(row)))
        self._file.flush()
        if held:
            print(*row, flush=True)

    def close(self) -> None:
        self._file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with books.txt.xz and dialogs.jsonl.xz")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder that tokenizer.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="length of the run; the rate is zero at its end")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=16, help="rows per step")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate, AdamW scale for Muon too")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--compile", action="store_true", help="torch.compile for norms, MLPs and the convolution")
    parser.add_argument("--amounts", default="{}", help="JSON over mixture.Amounts")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--held-out-batches", type=int, default=10**9, help="for the last measurement")
    parser.add_argument("--untimed-steps", type=int, default=20)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
