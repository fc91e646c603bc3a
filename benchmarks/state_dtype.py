"""What narrower temporal states cost in accuracy: a model on held-out text, its states kept in one dtype and in another.

    python -m benchmarks.state_dtype --model models/twinflow-tiny --corpus DIR [--dtypes float32,bfloat16] [--json FILE]

Text is fed one token at a time, so that every token's state is rounded as it is in decoding (chunks would hide it): nats a
token, how often the likeliest next token is that of the first dtype, and the divergence from its distribution. Then greedy
replies to prompts from the same text: how many are the same to the end, and where the others part. Weights and
activations are float32; `DIR` holds the corpus that `tools/train_tiny` reads.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.train_tiny.corpus import read_books
from twinflow.cache.arena import Arena, ArenaGeometry
from twinflow.models.base import ForwardBatch
from twinflow.models.loader import load_model


@dataclass(slots=True)
class Result:
    """Against the first dtype of the run: `same_next` share of positions with the same likeliest token; `divergence`
    KL(first, this) in nats a token; `same_replies` share of greedy replies equal to the end; `parted_at` tokens into a
    reply at which the others differ, on average."""

    dtype: str
    nats: float = 0.0
    same_next: float = 0.0
    divergence: float = 0.0
    same_replies: float = 0.0
    parted_at: float | None = None


class Stepper:
    """`sequences` sequences of up to `tokens` tokens, fed together, each with blocks and a slot of its own."""

    def __init__(self, folder: str, state_dtype: str, sequences: int, tokens: int, device: str) -> None:
        self.model = load_model(folder, dtype="float32", state_dtype=state_dtype, device=device)
        layout = self.model.layout
        self._block_tokens = layout.block_tokens
        blocks = -(-tokens // layout.block_tokens)
        budget = sequences * (layout.slot_bytes + blocks * layout.block_bytes) + layout.block_bytes
        geometry = ArenaGeometry.split(layout, budget, sequences, block_floor=sequences * blocks)
        self._arena = Arena(layout, geometry, device)
        self._device, self._fed = device, 0
        self._tables = torch.arange(sequences * blocks, dtype=torch.int32, device=device).view(sequences, blocks)
        self._rows = torch.tensor([geometry.slot_row(i) for i in range(sequences)], device=device)

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """The next tokens ids (B, n) of all sequences; logits (B, vocab) after the last ones."""
        count, n = ids.shape
        positions = torch.arange(self._fed, self._fed + n, device=self._device)
        blocks = self._tables[:, positions // self._block_tokens].long()
        lens = torch.full((count,), n, dtype=torch.int32, device=self._device)
        batch = ForwardBatch(
            input_ids=ids.reshape(-1),
            positions=positions.repeat(count),
            cu_seqlens=torch.arange(count + 1, dtype=torch.int32, device=self._device) * n,
            seq_lens=(n,) * count,
            context_lens=lens + self._fed,
            block_tables=self._tables,
            kv_slots=(blocks * self._block_tokens + positions % self._block_tokens).reshape(-1),
            state_rows=self._rows,
            fresh=torch.full((count,), self._fed == 0, device=self._device),
            logit_rows=torch.arange(count, device=self._device) * n + n - 1,
        )
        self._fed += n
        return self.model.forward(batch, self._arena)


def windows(corpus: Path, folder: str, sequences: int, tokens: int) -> torch.Tensor:
    """(sequences, tokens) ids from all over the held-out books."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    text = "\n".join(book.text for book in read_books(corpus) if book.held_out)
    ids = torch.tensor(tokenizer.encode(text).ids)
    if len(ids) < sequences * tokens:
        raise SystemExit(f"the held-out books have {len(ids)} tokens, {sequences} windows of {tokens} need more")
    step = (len(ids) - tokens) // max(1, sequences - 1)
    return torch.stack([ids[i * step : i * step + tokens] for i in range(sequences)])


def read_text(args: argparse.Namespace, text: torch.Tensor, results: list[Result]) -> None:
    """Fills in what teacher-forced text shows."""
    count, tokens = text.shape
    steppers = [Stepper(args.model, r.dtype, count, tokens, args.device) for r in results]
    began = time.monotonic()
    for at in range(tokens - 1):
        logs = [s.feed(text[:, at : at + 1]).log_softmax(-1) for s in steppers]
        for result, log in zip(results, logs, strict=True):
            result.nats -= log.gather(1, text[:, at + 1, None]).sum().item()
            result.same_next += (log.argmax(1) == logs[0].argmax(1)).sum().item()
            result.divergence += (logs[0].exp() * (logs[0] - log)).sum().item()
        if at % 128 == 127:
            print(f"  {at + 1} of {tokens - 1} tokens, {time.monotonic() - began:.0f} s", flush=True)
    for result in results:
        for name in ("nats", "same_next", "divergence"):
            setattr(result, name, getattr(result, name) / (count * (tokens - 1)))


def reply(args: argparse.Namespace, prompts: torch.Tensor, results: list[Result]) -> None:
    """Fills in what greedy replies show."""
    replies = []
    for result in results:
        stepper = Stepper(args.model, result.dtype, len(prompts), prompts.shape[1] + args.new_tokens, args.device)
        new = [stepper.feed(prompts).argmax(1)]
        while len(new) < args.new_tokens:
            new.append(stepper.feed(new[-1][:, None]).argmax(1))
        replies.append(torch.stack(new, 1))
    for result, mine in zip(results, replies, strict=True):
        same = mine == replies[0]
        whole = same.all(1)
        result.same_replies = whole.float().mean().item()
        if not bool(whole.all()):
            result.parted_at = same[~whole].float().argmin(1).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a tokenizer.json")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument(
        "--dtypes", default="float32,bfloat16", help="of temporal states; the first is what is compared with"
    )
    parser.add_argument("--sequences", type=int, default=32, help="windows of text, and prompts")
    parser.add_argument("--tokens", type=int, default=1024, help="of a window")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = windows(args.corpus, args.model, args.sequences, args.tokens).to(args.device)
    results = [Result(dtype) for dtype in args.dtypes.split(",")]
    with torch.inference_mode():
        read_text(args, text, results)
        reply(args, text[:, : args.prompt_tokens], results)
    print(f"{text.numel():,} tokens in {len(text)} windows; {len(text)} greedy replies of {args.new_tokens} tokens")
    print(f"{'states':<10} {'nats/token':>10} {'same next':>10} {'KL nats':>10} {'same replies':>12} {'parted at':>10}")
    for r in results:
        parted = "" if r.parted_at is None else f"{r.parted_at:.0f}"
        print(
            f"{r.dtype:<10} {r.nats:10.5f} {r.same_next:10.4%} {r.divergence:10.2e} {r.same_replies:12.1%} {parted:>10}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
