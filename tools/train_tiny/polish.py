"""Second stage: teaches greedy decoding not to go round in circles. After train.py, before evaluate.py.

    python -m tools.train_tiny.polish --corpus DIR --model TRAINED_DIR --tokenizer MODEL_DIR --out DIR --seconds 120

A small model's likeliest next word soon repeats what it just said. Rounds of two halves: the model answers prompts
greedily; then it trains on the usual mix while the tokens that closed a repeated run in its own answers become unlikely
(sequence-level unlikelihood, Welleck et al. 2019, arXiv:1908.04319).
"""

import argparse
import csv
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from tools.train_tiny import packed, recurrence, schedule
from tools.train_tiny.mixture import Amounts, Mixture
from tools.train_tiny.model import save_model
from tools.train_tiny.rows import Encoded, Encoder, Ids
from tools.train_tiny.steps import Batch, batches, endless_batches, held_out_loss, learned_logits, loss_of, step_all

COLUMNS = ("round", "step", "seconds", "rate", "train_loss", "unlikelihood", "repeated_share", "stopped_share")


@torch.no_grad()
def answer(
    model: Qwen3_5ForCausalLM, prompts: list[Ids], new_tokens: int, ends: list[int], pad: int, device: str
) -> list[Ids]:
    """Greedy continuations, end of turn included where there is one. All prompts in one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[i, longest - len(prompt) :] = 1
    with packed.plain():
        made = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=pad,
        )
    rows = made[:, longest:].cpu().numpy().astype(np.uint16)
    stops = [np.flatnonzero(np.isin(row, ends)) for row in rows]
    return [row[: stop[0] + 1] if len(stop) else row for row, stop in zip(rows, stops, strict=True)]


def closes_repeat(ids: Ids, run: int) -> np.ndarray:
    """True at tokens that close a run of `run` tokens seen before in `ids`."""
    seen: set[tuple[int, ...]] = set()
    marks = np.zeros(len(ids), bool)
    for end in range(run, len(ids) + 1):
        gram = tuple(ids[end - run : end].tolist())
        marks[end - 1] = gram in seen
        seen.add(gram)
    return marks


def unlikelihood(logits: Tensor, target: Tensor) -> Tensor:
    """Sum over targets of -log(1 - p(target)), without rounding 1 - p to zero."""
    others = logits.scatter(1, target[:, None], float("-inf"))
    return (logits.logsumexp(1) - others.logsumexp(1)).sum()


class Rounds:
    """Answers of the present model, as batches whose targets are the tokens to unlearn."""

    def __init__(
        self, args: argparse.Namespace, model: Qwen3_5ForCausalLM, mixture: Mixture, encoder: Encoder, device: str
    ) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._speaker = Qwen3_5ForCausalLM(model.config).to(device, dtype).eval()
        self._args, self._mixture, self._encoder, self._device = args, mixture, encoder, device
        self._ends = list(model.generation_config.eos_token_id)
        self.repeated = self.stopped = 0.0  # shares in the latest answers, of tokens and of answers
        self.tokens_per_row = 1.0

    def batches(self, model: Qwen3_5ForCausalLM) -> Iterator[Batch]:
        self._speaker.load_state_dict(model.state_dict())
        prompts = self._mixture.prompts(self._args.prompts, self._args.prompt_tokens)
        pad = model.config.pad_token_id
        answers = answer(self._speaker, prompts, self._args.new_tokens, self._ends, pad, self._device)
        marks = [closes_repeat(a, self._args.run) for a in answers]
        self.repeated = sum(int(m.sum()) for m in marks) / sum(map(len, answers))
        self.stopped = sum(a[-1] in self._ends for a in answers) / len(answers)
        whole = [
            Encoded(np.concatenate([p, a]), np.concatenate([np.zeros(len(p), bool), m]))
            for p, a, m in zip(prompts, answers, marks, strict=True)
        ]
        rows = self._encoder.chat_rows(whole)
        self.tokens_per_row = sum(map(len, answers)) / len(rows)
        return itertools.chain.from_iterable(
            batches(rows, min(self._args.answer_rows, len(rows)), self._device) for _ in range(self._args.passes)
        )


def polish(args: argparse.Namespace) -> None:
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    mixture = Mixture(args.corpus, tokenizer, args.row_tokens, Amounts(**json.loads(args.amounts)))
    real = endless_batches(mixture, args.rows, device)
    model = Qwen3_5ForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).train()
    schedule.add_dropout(model, args.dropout)
    packing = packed.Packing(torch.zeros(0))
    rule_name, rule = recurrence.pick(device)
    packed.install(packing, rule, compile_convolution=False)
    optimizers = [schedule.gentle(model, args.rate)]
    rounds = Rounds(args, model, mixture, Encoder(tokenizer, args.row_tokens), device)
    print(f"ready after {time.monotonic() - started:.0f} s, recurrence: {rule_name}", flush=True)

    step, progress, saved_at = 0, 0.0, 0.0
    with (args.out / "polish.csv").open("w", newline="") as f:
        log = csv.writer(f)
        log.writerow(COLUMNS)
        for number in itertools.count(1):
            losses: list[tuple[Tensor, Tensor]] = []
            for unlearn in rounds.batches(model):
                progress = (time.monotonic() - started) / args.seconds
                if progress >= 1:
                    break
                schedule.set_rate(optimizers, args.rate, progress)
                loss = loss_of(model, packing, next(real)[1], device)
                loss.backward()
                penalty = unlikelihood(*learned_logits(model, packing, unlearn, device))
                penalty = args.weight * penalty / (rounds.tokens_per_row * len(unlearn.ids))
                penalty.backward()
                step_all(model, optimizers)
                step += 1
                losses.append((loss.detach(), penalty.detach()))
            if losses:
                means = torch.tensor(losses).mean(0).tolist()
                seconds = round(time.monotonic() - started, 1)
                row = (
                    number,
                    step,
                    seconds,
                    f"{args.rate * schedule.rate(progress):.1e}",
                    *(f"{m:.4f}" for m in means),
                )
                row = (*row, f"{rounds.repeated:.4f}", f"{rounds.stopped:.4f}")
                log.writerow(row)
                f.flush()
                print(*row, flush=True)
            if progress >= 1 or progress > saved_at + 0.2:
                saved_at = progress
                stored = Qwen3_5ForCausalLM(model.config).to(torch.bfloat16)
                stored.load_state_dict(model.state_dict())
                save_model(stored, tokenizer, args.out)
            if progress >= 1:
                break
    held = [
        held_out_loss(model, packing, rows, args.rows, device, args.held_out_batches)
        for rows in (mixture.held_out_books, mixture.held_out_chats)
    ]
    print(f"held-out loss: books {held[0]:.4f}, chats {held[1]:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder that tokenizer.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the whole program, preparation included")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8, help="rows of the usual mix per step")
    parser.add_argument("--answer-rows", type=int, default=4, help="rows of own answers per step")
    parser.add_argument("--prompts", type=int, default=1024, help="answers per round")
    parser.add_argument("--prompt-tokens", type=int, default=160, help="longer prompts are left out")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--passes", type=int, default=2, help="over a round's answers")
    parser.add_argument("--run", type=int, default=5, help="length of a run that must not come back, in tokens")
    parser.add_argument("--weight", type=float, default=2.0, help="of the unlikelihood loss")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--amounts", default='{"sums": 30000}', help="JSON over mixture.Amounts")
    parser.add_argument("--held-out-batches", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    polish(args)


if __name__ == "__main__":
    main()
