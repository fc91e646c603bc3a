"""Trains the model for a given number of minutes and leaves bf16 weights, config and the loss curve in a folder.

    python -m tools.train_tiny.train --corpus DIR --tokenizer MODEL_DIR --out DIR --minutes 8

Master weights and optimiser state are fp32, arithmetic is bf16 autocast. The last step writes the weights as stored
(bf16), reads them back and measures the held-out loss on those.
"""

import argparse
import csv
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from tools.train_tiny import packed, recurrence, schedule
from tools.train_tiny.mixture import Amounts, Mixture
from tools.train_tiny.model import make_config, save_model
from tools.train_tiny.steps import endless_batches, held_out_loss, loss_of, step_all

COLUMNS = ("step", "seconds", "tokens", "epochs", "rate", "train_loss", "held_out_books_loss", "held_out_chats_loss")


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
    schedule.spread_decays(model)
    schedule.add_dropout(model, args.dropout)
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
        step_all(model, optimizers)
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
