"""Measures a stored model: bits per byte on held-out books, tool calls on held-out orders, sums, stories, samples.

    python -m tools.train_tiny.evaluate --corpus DIR --model MODEL_DIR --out evaluation.json

Weights are read as stored (bf16) and computed with in fp32; every answer is greedy. `--samples-only` writes just the
answers that the model card shows.
"""

import argparse
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.train_tiny import chats
from tools.train_tiny.chats import Chat
from tools.train_tiny.corpus import Book, Dialog, known_tools, read_books, read_dialogs
from tools.train_tiny.tokenizer import END_OF_TEXT

WINDOW, STRIDE = 4096, 2048  # every scored token but a book's first 2,048 sees at least 2,048 tokens before it
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
SAMPLES = (
    "Continue the story: The old man opened the door and looked out into the snow. Far away he saw a small light moving.",
    "Tell me a story about a dragon.",
    'Continue this text: "Where have you been all day?" asked the boy. The cat sat down upon the wall and',
    "A baker makes 24 cakes in the morning and 18 in the afternoon. She sells 30 of them. How many cakes are left?",
    "Hi, can I get a large latte with oat milk, please?",
)


class Speaker:
    """The model with its tokenizer: greedy answers in batches, and log-likelihoods."""

    def __init__(self, folder: Path, device: str, batch: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        self._device, self._batch = device, batch

    @torch.no_grad()
    def answers(self, prompts: Sequence[Chat], max_new_tokens: int = 256) -> list[tuple[str, bool]]:
        """(text without end of turn, stopped by itself) per chat. Batches are by length: little padding."""
        texts = [
            self.tokenizer.apply_chat_template(c.messages, tools=c.tools, tokenize=False, add_generation_prompt=True)
            for c in prompts
        ]
        ids = [self.tokenizer(t).input_ids for t in texts]
        order = sorted(range(len(ids)), key=lambda k: len(ids[k]))
        out: list[tuple[str, bool]] = [("", False)] * len(ids)
        ends = self.model.generation_config.eos_token_id
        for at in range(0, len(order), self._batch):
            part = order[at : at + self._batch]
            inputs = self.tokenizer.pad({"input_ids": [ids[k] for k in part]}, return_tensors="pt").to(self._device)
            made = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
            for k, row in zip(part, made[:, inputs.input_ids.shape[1] :].tolist(), strict=True):
                length = next((i for i, t in enumerate(row) if t in ends), None)
                out[k] = (self.tokenizer.decode(row[:length]), length is not None)
        return out

    @torch.no_grad()
    def bits(self, text: str) -> float:
        """Total bits of the raw text, in overlapping windows; an end-of-text token stands before the first."""
        ids = torch.tensor(self.tokenizer(END_OF_TEXT + text, verbose=False).input_ids)
        starts = list(range(0, max(1, len(ids) - WINDOW + STRIDE), STRIDE))
        total = 0.0
        for start in starts:
            window = ids[start : start + WINDOW].to(self._device)
            logits = self.model(window[None, :-1], use_cache=False).logits[0]
            nats = F.cross_entropy(logits, window[1:], reduction="none")
            total += nats[0 if start == 0 else WINDOW - STRIDE - 1 :].sum().item()
        return total / math.log(2)


def bits_per_byte(speaker: Speaker, books: list[Book]) -> dict[str, float]:
    """Per title and, under "all", over all bytes together."""
    sizes = {b.title: len(b.text.encode()) for b in books}
    bits = {b.title: speaker.bits(b.text) for b in books}
    per_book = {title: round(bits[title] / sizes[title], 4) for title in bits}
    return per_book | {"all": round(sum(bits.values()) / sum(sizes.values()), 4)}


def parse_call(text: str, names: set[str]) -> dict[str, Any] | None:
    """The first tool call of an answer, if it is well formed and names a known tool."""
    match = CALL.search(text)
    try:
        call = json.loads(match.group(1)) if match else None
    except json.JSONDecodeError:
        return None
    good = isinstance(call, dict) and call.get("name") in names and isinstance(call.get("arguments"), dict)
    return call if good else None


def tool_calls(
    speaker: Speaker, dialogs: list[Dialog], tools: list[dict[str, Any]], first_only: bool
) -> dict[str, int]:
    """Orders whose next message is a tool call, history as in the data: how many answers match it, and how far."""
    prompts, wanted = [], []
    for dialog in dialogs:
        for i, message in enumerate(dialog.messages):
            if "tool_calls" in message and (i == 1 or not first_only):
                prompts.append(Chat(dialog.messages[:i], tools))
                wanted.append(message["tool_calls"][0]["function"])
    names = {t["function"]["name"] for t in tools}
    got = [parse_call(text, names) for text, _ in speaker.answers(prompts)]
    pairs = [(g, w) for g, w in zip(got, wanted, strict=True) if g is not None]
    return {
        "asked": len(prompts),
        "well_formed": len(pairs),
        "same_tool": sum(g["name"] == w["name"] for g, w in pairs),
        "same_call": sum(g == w for g, w in pairs),
    }


def right_answers(speaker: Speaker, dialogs: list[Dialog], count: int) -> dict[str, dict[str, int]]:
    """Last lines "The answer is N": held-out one-step sums (made as in training) and held-out worked problems."""
    rng = random.Random(2)
    sums = [s for s in (chats.make_sum(rng) for _ in range(count * 30)) if chats.sum_held_out(s[0])][:count]
    asked = {
        "sums": [(f"What is {question}?", str(answer)) for question, answer in sums],
        "problems": [(d.messages[0]["content"], d.messages[1]["content"].split()[-1]) for d in dialogs[:count]],
    }
    result = {}
    for kind, pairs in asked.items():
        answers = speaker.answers([Chat([{"role": "user", "content": q}]) for q, _ in pairs])
        right = sum(
            a.strip().endswith(f"The answer is {want}") for (a, _), (_, want) in zip(answers, pairs, strict=True)
        )
        result[kind] = {"asked": len(pairs), "right": right}
    return result


def story_health(speaker: Speaker, books: list[Book], count: int) -> dict[str, float | int]:
    """Do greedy stories stop by themselves, and do they loop (some run of six words three times or more)?"""
    prompts = [Chat(c.messages[:-1]) for c in chats.stories(books, count, random.Random(3))]
    answers = speaker.answers(prompts)
    return {
        "asked": count,
        "stopped": sum(stopped for _, stopped in answers),
        "looping": sum(loops(text) for text, _ in answers),
        "mean_words": round(sum(len(text.split()) for text, _ in answers) / count, 1),
    }


def loops(text: str, run: int = 6, times: int = 3) -> bool:
    words = text.split()
    counts = Counter(tuple(words[i : i + run]) for i in range(len(words) - run + 1))
    return bool(counts) and max(counts.values()) >= times


def samples(speaker: Speaker, tools: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One at a time, so that no padding takes part."""
    out = []
    for prompt in SAMPLES:
        chat = Chat([{"role": "user", "content": prompt}], tools if "latte" in prompt else None)
        out.append({"prompt": prompt, "answer": speaker.answers([chat])[0][0]})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--count", type=int, default=100, help="how many sums, problems, stories and orders to ask")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--samples-only", action="store_true")
    args = parser.parse_args()
    speaker = Speaker(args.model, "cuda" if torch.cuda.is_available() else "cpu", args.batch)
    dialogs = list(read_dialogs(args.corpus))
    tools = known_tools([d for d in dialogs if not d.held_out])
    books = [b for b in read_books(args.corpus) if b.held_out]
    orders = [d for d in dialogs if d.held_out and d.topic == "coffee"]
    problems = [d for d in dialogs if d.held_out and d.topic == "arithmetic"]
    n = args.count
    parts: dict[str, Callable[[], Any]] = {
        "samples": lambda: samples(speaker, tools),
        "orders_first_ten": lambda: tool_calls(speaker, orders[:10], tools, first_only=True),
        "orders_first_call": lambda: tool_calls(speaker, orders[:n], tools, first_only=True),
        "stories": lambda: story_health(speaker, books, n),
        "arithmetic": lambda: right_answers(speaker, problems, n),
        "bits_per_byte": lambda: bits_per_byte(speaker, books),
        "orders_every_call": lambda: tool_calls(speaker, orders[: n // 3], tools, first_only=False),
    }
    result: dict[str, Any] = {}
    for name in ("samples",) if args.samples_only else parts:
        result[name] = parts[name]()
        print(f"{name}: {json.dumps(result[name], indent=1, ensure_ascii=False)}", flush=True)
        args.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
