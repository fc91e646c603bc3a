"""What replies held to a grammar cost the host: compiling, and the masks of one decode step.

    python3 -m benchmarks.grammar_masks [--tokenizer FILE] [--vocab N] [--batch 64] [--threads 4]

For each kind of grammar a batch of replies follows the same text, a token a step, each from its own place in it, so that a
step has all kinds of masks. CPU time, of one thread:

    compile     text → the first mask, as a request waits for it once per text
    copy        a matcher of its own for another reply of the same grammar
    mask        what may come next, for one row; the mean, and the slowest step's
    follow      taking one token, for one row: the part that the engine's loop does itself
    step        masks of the whole batch on `--threads` threads, wall time: what the draws of a step wait for, while the device
                computes its forward pass
    copied      bytes of masks to the device in one step

Without `--tokenizer` the shipped model's; with `--vocab N` a made-up byte-level tokenizer of N tokens, as large ones have.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twinflow.contracts.requests import GenerateRequest, Grammar, GrammarKind, SamplingParams
from twinflow.engine.base import Mode, Submit
from twinflow.engine.guides import Guides
from twinflow.engine.sequence import Phase, Sequence
from twinflow.grammar.base import Compiled, Compiler, words_of
from twinflow.grammar.guide import Guide
from twinflow.grammar.llguidance import LlguidanceCompiler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
ADA = {
    "name": "Ada Lovelace of London",
    "age": 36,
    "tags": ["red", "blue"],
    "address": {"street": "12 St James's Square, the big house at the corner", "zip": "12345"},
}
EMAIL = r"[a-z0-9.]+@[a-z0-9]+(\.[a-z]{2,9})+"
WORDS = 'start: sentence+\nsentence: word (" " word)* ". "\nword: /[A-Za-z]+/\n'
# name, kind, text, a reply
CASES = [
    ("schema", GrammarKind.JSON_SCHEMA, json.dumps(PERSON), json.dumps(ADA)),
    ("any object", GrammarKind.JSON_SCHEMA, '{"type": "object"}', json.dumps(ADA)),
    ("regex", GrammarKind.REGEX, EMAIL, "ada.lovelace.of.london@analytical.engine.example"),
    ("choice", GrammarKind.CHOICE, json.dumps(["positive", "negative", "no idea"]), "no idea"),
    ("lark", GrammarKind.GRAMMAR, WORDS, "The king went home. The queen did not. Nobody knows why. "),
]


def made_up(vocab: int, folder: Path) -> Path:
    """A byte-level tokenizer: pieces grown from pieces, mostly of letters, as those of real ones are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng, known, merges = random.Random(0), dict.fromkeys(alphabet), []
    letters = (
        [c for c in alphabet if c.isascii() and c.isalpha()] * 4 + ["Ġ"] * 8 + [c for c in alphabet if c.isascii()]
    )
    grown = list(letters)
    while len(known) < vocab - 1:
        pair = rng.choice(grown), rng.choice(letters if rng.random() < 0.6 else grown)
        piece = "".join(pair)
        if len(piece) <= 12 and piece not in known and "Ġ" not in piece[1:]:
            known[piece] = None
            merges.append(pair)
            grown.append(piece)
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(known)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def sequence(compiled: Compiled, params: SamplingParams, eos: Seq[int], reply: Seq[int]) -> Sequence:
    request = GenerateRequest("r", b"\0\0\0\0", params, b"0" * 16)
    made = Sequence.submitted(Submit(request, Mode.LOCAL), 64)
    made.phase = Phase.RUNNING
    made.guide = Guide(compiled.start(), params, eos)
    made.generated = list(reply)
    return made


def measure(
    name: str, grammar: Grammar, reply: list[int], compiler: LlguidanceCompiler, eos: int, args: argparse.Namespace
) -> None:
    params = SamplingParams(max_tokens=10_000, seed=0, grammar=grammar)
    began = time.process_time()
    compiled = compiler.compile(grammar)
    compile_s = time.process_time() - began
    began = time.process_time()
    for _ in range(args.batch):
        compiled.start()
    copy_s = (time.process_time() - began) / args.batch
    batch = [sequence(compiled, params, [eos], reply[: k * len(reply) // args.batch]) for k in range(args.batch)]
    row = np.zeros(words_of(compiler.vocab_size), dtype=np.int32)
    masks_s, follow_s = [], 0.0
    for _ in range(args.steps):
        began = time.process_time()
        for s in batch:
            assert s.guide is not None
            s.guide.fill(s.generated, row)
        masks_s.append(time.process_time() - began)
        for s in batch:
            assert s.guide is not None and s.guide.error is None, s.guide
            if len(s.generated) + 1 >= len(reply):  # from the start again
                s.generated, s.guide = [], Guide(compiled.start(), params, [eos])
            s.generated.append(reply[len(s.generated)])
        began = time.process_time()
        for s in batch:
            assert s.guide is not None
            s.guide.follow(s.generated)
        follow_s += time.process_time() - began
    ready: Future[Compiler] = Future()
    ready.set_result(compiler)
    guides = Guides(ready, compiler.vocab_size, [eos], args.batch, "cpu", args.threads, lambda _: None)
    step_s = []
    for _ in range(args.steps):
        began = time.perf_counter()
        job = guides.masks(list(enumerate(batch)))
        assert job is not None
        bits = job.result().bits
        step_s.append(time.perf_counter() - began)
    guides.close()
    rows = args.batch * args.steps
    print(
        f"{name:12s} {1e3 * compile_s:8.2f} ms {1e6 * copy_s:6.1f} µs {1e6 * sum(masks_s) / rows:8.1f} µs "
        f"{1e6 * max(masks_s) / args.batch:8.1f} µs {1e6 * follow_s / rows:7.1f} µs {1e3 * min(step_s):8.2f} ms "
        f"{1e3 * sorted(step_s)[len(step_s) // 2]:8.2f} ms {bits.nbytes / 1e6:7.2f} MB"
    )


def main(argv: Seq[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/twinflow-tiny/tokenizer.json"))
    parser.add_argument("--vocab", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=4)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        file = made_up(args.vocab, Path(folder)) if args.vocab else args.tokenizer
        tokenizer = Tokenizer.from_file(str(file))
        vocab, eos = (
            tokenizer.get_vocab_size(),
            next(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special),
        )
        began = time.process_time()
        compiler = LlguidanceCompiler(file, vocab, [eos])
        print(
            f"{file.name if not args.vocab else 'made up'}, {vocab} tokens, read in {time.process_time() - began:.2f} s of CPU"
        )
    print(f"batch {args.batch}, {args.steps} steps; a step's masks on {args.threads} threads: fastest, median")
    heads = zip(
        ("compile", "copy", "mask", "slowest", "follow", "step", "step", "copied"), (11, 9, 11, 11, 10, 11, 11, 10)
    )
    print(" " * 12, *(f"{head:>{width}s}" for head, width in heads))
    for name, kind, text, reply in CASES:
        measure(name, Grammar(kind, text), tokenizer.encode(reply, add_special_tokens=False).ids, compiler, eos, args)


if __name__ == "__main__":
    main()
