"""Trains the byte-level BPE on what is not held out and writes a tokenizer that transformers loads unchanged.

No normaliser and no prefix space: decode(encode(text)) == text for every string. Digits stand alone, which makes
arithmetic and the copying of order numbers learnable for a small model.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train_tiny.corpus import known_tools, read_books, read_dialogs

VOCAB_SIZE = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (END_OF_TEXT, TURN_START, TURN_END)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # one id each; decoding never drops them
# The split of the Qwen family: contractions, words with one leading mark, digits, runs of marks, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def training_text(corpus: Path) -> Iterator[str]:
    """Half of the books' paragraphs (plenty for 4,096 tokens), all dialogs, and the tool list a few times over."""
    rng = random.Random(0)
    for book in read_books(corpus):
        if not book.held_out:
            yield from (p + "\n\n" for p in book.text.split("\n\n") if rng.random() < 0.5)
    dialogs = [d for d in read_dialogs(corpus) if not d.held_out]
    yield from [json.dumps(tool) for tool in known_tools(dialogs)] * 50
    for dialog in dialogs:
        for message in dialog.messages:
            yield message["content"] or json.dumps(message["tool_calls"][0]["function"])


def train(corpus: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in CONTROL]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TAGS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(corpus), trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return tokenizer


def write(tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(Path(__file__).with_name("chat_template.jinja"), out / "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with books.txt.xz and dialogs.jsonl.xz")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write the tokenizer into")
    args = parser.parse_args()
    tokenizer = train(args.corpus)
    write(tokenizer, args.out)
    sample = next(b.text for b in read_books(args.corpus) if b.held_out)
    bytes_per_token = len(sample.encode()) / len(tokenizer.encode(sample).ids)
    print(f"{tokenizer.get_vocab_size()} tokens, {bytes_per_token:.2f} bytes a token on a held-out book")


if __name__ == "__main__":
    main()
