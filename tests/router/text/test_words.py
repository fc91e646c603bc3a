"""Ids by the word are the library's, whatever the text; where that is not known to be so, the library is asked."""

import random
import threading
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from services.router.text import words as module
from services.router.text.templates import ChatTemplate
from services.router.text.tokenizer import ModelText
from services.router.text.words import Unfit, Words
from twinflow.contracts.hashing import pack_tokens, unpack_tokens

SHIPPED = Path(__file__).parents[3] / "models" / "twinflow-tiny" / "tokenizer.json"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = "He said: \"don't WE'LL go\"\n\n  at 12345 o'clock?!  café — ‘señor’… x=[1, 2];\t\tend  " * 4


def split_by(pattern: str, behavior: str = "isolated"):
    by_pattern = pre_tokenizers.Split(Regex(pattern), behavior)
    return pre_tokenizers.Sequence([by_pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def build(pre=None, marks: list[AddedToken] | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens(marks or [])
    return tokenizer


MARKS = [AddedToken(text, normalized=False, special=True) for text in ("<|end|>", "<|end|>>", "<x", "a|")]
KINDS = {
    "shipped": lambda: Tokenizer.from_file(str(SHIPPED)),
    "gpt2": build,
    "llama3": lambda: build(split_by(LLAMA3)),
    "o200k": lambda: build(split_by(O200K)),
    "marks": lambda: build(split_by(LLAMA3), MARKS),
}


def by_library(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def by_words(words: Words, text: str) -> list[int]:
    """Short ones have two ways."""
    packed = b"".join(words.encode(text))
    assert words.encode_short(text) == packed
    return unpack_tokens(packed)


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts(kind):
    tokenizer = KINDS[kind]()
    words, rng = Words.of(tokenizer), random.Random(kind)
    assert words is not None
    single = [chr(c) for c in (*range(128), *range(0xA0, 0x100), *range(0x2010, 0x2028))]
    often = [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'Re", "a", "B", "7", "é", *words._marks] * 12
    for i in range(3000):
        text = "".join(rng.choices(single + often, k=rng.randrange(40)))
        assert words.fits(text)
        assert by_words(words, text) == by_library(tokenizer, text), (i, text)


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_done_in_slices(kind, monkeypatch):
    monkeypatch.setattr(module, "SLICE_WORDS", 7)
    monkeypatch.setattr(module, "AT_ONCE_CHARS", 50)
    tokenizer = KINDS[kind]()
    words = Words.of(tokenizer)
    for text in (TEXT * 3, " " * 500, "\n" * 51 + "<|end|>" + "ab" * 60, TEXT + "<|end|>" * 3 + TEXT):
        parts = list(words.encode(text))
        assert unpack_tokens(b"".join(parts)) == by_library(tokenizer, text)
    assert len(list(words.encode(TEXT))) > 4


@pytest.mark.parametrize(
    "text", ["日本", "naïve ŝ", "e\u0301", "\x85", "\u2028", "\u200b", "К", "😀"], ids=lambda text: ascii(text)
)
def test_other_characters_do_not_fit(text):
    assert not Words.of(build()).fits("plain, then " + text)


def with_(tokenizer: Tokenizer, **parts: object) -> Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


UNKNOWN = {
    "prefix space": lambda: build(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "removed": lambda: build(split_by(LLAMA3, "removed")),
    "dot": lambda: build(split_by(r".|\n")),
    "possessive": lambda: build(split_by(r"\p{N}{1,3}+|\s+|\S")),
    "intersection": lambda: build(split_by(r"[a-z&&[^b]]+|\S|\s")),
    "word": lambda: build(split_by(r"\w+|\W")),
    "empty": lambda: build(split_by(r"\p{L}*")),
    "digits": lambda: build(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])),
    "lower case": lambda: with_(build(), normalizer=normalizers.Lowercase()),
    "marks are spelt": lambda: with_(build(marks=MARKS), encode_special_tokens=True),
    "stripping": lambda: build(marks=[AddedToken("<m>", lstrip=True)]),
    "two kinds of marks": lambda: build(marks=[*MARKS, AddedToken("<m>", normalized=True)]),
    "no bytes": lambda: with_(build(), pre_tokenizer=pre_tokenizers.Whitespace()),
    "no pieces": lambda: with_(build(), pre_tokenizer=None),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_tokenizers_are_left_to_the_library(kind):
    assert Words.of(UNKNOWN[kind]()) is None


def test_normal_form_c_changes_nothing_that_fits():
    assert Words.of(with_(build(), normalizer=normalizers.NFC())) is not None


async def test_what_the_pattern_leaves_out_is_left_to_the_library():
    tokenizer = build(split_by(r"\p{L}+|\s"))
    words = Words.of(tokenizer)
    for text in ("two words 12 and more", "ab " * 9000 + "1"):
        with pytest.raises(Unfit):
            list(words.encode(text))
        encoded = await ModelText(tokenizer, ChatTemplate({}, {}), ()).encode(text, add_special_tokens=False)
        assert unpack_tokens(encoded) == by_library(tokenizer, text)


@pytest.mark.parametrize("told", ["a" * 9000, " ".join("b" * n for n in range(200))], ids=["one word", "many"])
async def test_what_takes_long_to_learn_is_left_to_the_library_and_its_thread(told, monkeypatch):
    tokenizer = build()
    words, text = Words.of(tokenizer), ModelText(tokenizer, ChatTemplate({}, {}), ())
    with pytest.raises(Unfit):
        list(words.encode(told))
    assert words._known == words._marks
    threads, slow = [], text.encode_now

    def encode_now(*args, **options):
        threads.append(threading.current_thread())
        return slow(*args, **options)

    monkeypatch.setattr(text, "encode_now", encode_now)
    assert unpack_tokens(await text.encode(told, add_special_tokens=False)) == by_library(tokenizer, told)
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


async def test_a_text_of_any_kind_through_the_model():
    tokenizer = Tokenizer.from_file(str(SHIPPED))
    text = ModelText(tokenizer, ChatTemplate({}, {}), ())
    for told in ("", "hello", "<|im_start|>user\nhello<|im_end|>\n", "日本 " * 10, TEXT * 100, "日本 " * 4000):
        for special in (True, False):
            ids = text.encode_now(told, add_special_tokens=special)
            assert await text.encode(told, add_special_tokens=special) == pack_tokens(ids)


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_WORDS", 100)
    tokenizer = build()
    words = Words.of(tokenizer)
    for i in range(300):
        text = f"word {chr(97 + i % 26) * (1 + i // 26)} {'x' * 40}{i}"
        assert by_words(words, text) == by_library(tokenizer, text)
        assert len(words._known) <= 100
        assert max(map(len, words._known)) <= module.MAX_WORD_CHARS
