"""Incremental text equals decoding everything at once, for random ids and for characters split over tokens."""

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.router.text.detokenize import TokenTexts
from tests.router.conftest import build_tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece-like, as Llama 2's: words with a leading ▁, bytes for the rest."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "▁hello",
        "▁world",
        "lo",
        "!",
        "é",
        "▁▁",
    ]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces(texts: TokenTexts, ids: list[int]) -> list[str]:
    """Of each token; all at once they are the same text, wherever they are cut in two."""
    detokenizer = texts.detokenizer()
    found = [*(detokenizer.push(i) for i in ids), detokenizer.finish()]
    for cut in {0, len(ids) // 2, len(ids)}:
        whole = texts.detokenizer()
        assert whole.push_all(ids[:cut]) + whole.push_all(ids[cut:]) + whole.finish() == "".join(found)
    return found


@pytest.fixture(scope="module", params=[build_tokenizer, byte_fallback_tokenizer], ids=["byte-level", "byte-fallback"])
def texts(request) -> TokenTexts:
    return TokenTexts(request.param())


def shipped() -> Tokenizer:
    """A byte-level one with special tokens and with added ones that are none."""
    tokenizer = Tokenizer.from_file(str(Path(__file__).parents[3] / "models" / "twinflow-tiny" / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("héllo wörld"), AddedToken("😀é")])
    return tokenizer


@pytest.mark.parametrize("seed", range(40))
def test_a_real_tokenizer_warm_and_cold(seed):
    """Parts of characters before, between and after whole tokens; texts of whole ones are known from the second time on."""
    draw, texts = random.Random(seed), TokenTexts(shipped())
    tokenizer = texts.tokenizer
    added = sorted(tokenizer.get_added_tokens_decoder())
    split = [
        i for text in ("😀", "é̂", "日本語", "👩‍👩‍👧") for i in tokenizer.encode(text, add_special_tokens=False).ids
    ]
    plain = range(tokenizer.get_vocab_size(with_added_tokens=True))
    for _ in range(12):
        ids = [draw.choice(draw.choice([added, split, plain])) for _ in range(draw.randrange(1, 60))]
        assert "".join(pieces(texts, ids)) == tokenizer.decode(ids, skip_special_tokens=True)
    assert texts.whole.keys().isdisjoint(texts.special_ids)


@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, 300, 50)], ids=str)
def test_random_ids(texts, seeds):
    """Any ids, half of them bytes: invalid UTF-8, special and unknown tokens included."""
    for seed in seeds:
        draw = random.Random(seed)
        size = texts.tokenizer.get_vocab_size(with_added_tokens=True)
        ids = [draw.randrange(size + 2) for _ in range(draw.randrange(1, 40))]
        assert "".join(pieces(texts, ids)) == texts.tokenizer.decode(ids, skip_special_tokens=True), seed


@pytest.mark.parametrize(
    "text", ["naïve 😀👩‍👩‍👧 ok", "日本語のテキスト", "a\ud83d".encode(errors="ignore").decode() + "é", "x😀" * 20]
)
def test_characters_over_several_tokens_are_never_split(texts, text):
    ids = texts.tokenizer.encode(text, add_special_tokens=False).ids
    out = pieces(texts, ids)
    assert "".join(out) == texts.tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("�" in piece for piece in out)


def test_an_emoji_comes_whole_with_its_last_token():
    texts = TokenTexts(build_tokenizer())
    ids = texts.tokenizer.encode("😀").ids
    assert len(ids) > 1
    assert pieces(texts, ids) == [*[""] * (len(ids) - 1), "😀", ""]


def test_an_unfinished_character_shows_at_the_end():
    texts = TokenTexts(build_tokenizer())
    ids = texts.tokenizer.encode("ok😀").ids[:-1]
    assert "".join(pieces(texts, ids)) == texts.tokenizer.decode(ids) == "ok�"


def test_work_per_token_does_not_grow(monkeypatch):
    """The window decoder never decodes more than it holds, whatever came before."""
    texts = TokenTexts(byte_fallback_tokenizer())
    detokenizer = texts.detokenizer()
    longest = 0
    decode = type(detokenizer)._decode

    def counting(self, ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids)

    monkeypatch.setattr(type(detokenizer), "_decode", counting)
    for i in range(2000):
        detokenizer.push(3 + 0x80 if i % 100 else 262)  # long runs of invalid bytes
    assert longest <= 66


def test_token_texts_for_logprobs():
    texts = TokenTexts(build_tokenizer())
    ids = texts.tokenizer.encode("é").ids
    assert b"".join(texts.text_and_bytes(i)[1] for i in ids) == "é".encode()
    assert texts.text_and_bytes(10**6) == ("", b"")


def test_ids_are_those_of_the_slow_way_with_offsets(text):
    tokenizer = text.texts.tokenizer
    for told in ("hello there, how are you?", "", "<|im_start|>user\nfoo<|im_end|>", "é̂€ 日本 <tool_call>\n" * 40):
        for special in (True, False):
            slow = tokenizer.encode(told, add_special_tokens=special).ids
            assert text.encode_now(told, add_special_tokens=special) == slow
