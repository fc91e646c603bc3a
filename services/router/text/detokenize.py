"""Token ids → text while they arrive, never splitting a character.

The texts of all pushes plus `finish()` equal `decode(all ids, skip_special_tokens=True)`, but for special tokens that mark
calls or thoughts: parsers need to see those. Two ways:

* byte-level tokenizers (most hybrids): every token is known bytes; those of an unfinished UTF-8
  character are held back. Exact and O(1) per token.
* any other decoder (SentencePiece-like): decode a short window of held tokens, give out what is settled. A run of
  byte-fallback tokens is held until it ends, since one bad byte changes the text of the whole run; at most
  `MAX_HELD_TOKENS`.
"""

import codecs
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from tokenizers import Tokenizer, decoders

MAX_HELD_TOKENS = 64
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Text that this token settles, possibly empty."""
        ...

    def push_all(self, token_ids: Sequence[int]) -> str:
        """As `push` of each."""
        ...

    def finish(self) -> str:
        """Text still held; the detokenizer is used up."""
        ...


class TokenTexts:
    """What single tokens are as bytes and text; shared by all sequences of a model."""

    def __init__(self, tokenizer: Tokenizer, markers: frozenset[str] = frozenset()) -> None:
        """`markers`: texts that are shown even where they are special tokens."""
        self.tokenizer = tokenizer
        special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(i for i, text in special.items() if text not in markers)
        self.marker_ids = frozenset(special) - self.special_ids
        self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._byte_of = _byte_level_alphabet() if self.byte_level else {}
        self._bytes: dict[int, bytes] = {}  # of tokens that came, at most the vocabulary
        self.whole: dict[int, str] = {}  # text of those that are whole characters, shown wherever a character may begin

    def detokenizer(self) -> Detokenizer:
        return ByteLevelDetokenizer(self) if self.byte_level else WindowDetokenizer(self)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a byte-level token stands for, b"" for an unknown id."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            raw = bytes(self._byte_of[c] for c in token)
        except KeyError:  # an added token is plain text
            raw = token.encode()
        self._bytes[token_id] = raw
        return raw

    def learn_whole(self, token_id: int) -> None:
        """Puts a byte-level token into `whole` if it belongs there."""
        raw = self.token_bytes(token_id)
        if raw and token_id not in self.special_ids:
            with suppress(UnicodeDecodeError):
                self.whole[token_id] = raw.decode()

    def text_and_bytes(self, token_id: int) -> tuple[str, bytes]:
        """One token on its own, for logprobs; the text of a part of a character is U+FFFD, the bytes are its own."""
        if self.byte_level:
            raw = self.token_bytes(token_id)
            return raw.decode(errors="replace"), raw
        token = self.tokenizer.id_to_token(token_id) or ""
        if _BYTE_TOKEN.fullmatch(token):
            raw = bytes([int(token[3:5], 16)])
            return raw.decode(errors="replace"), raw
        text = token.replace("▁", " ")
        return text, text.encode()


class ByteLevelDetokenizer:
    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._whole = texts.whole
        self._held = b""  # of a character that has begun and not ended

    def push(self, token_id: int) -> str:
        if not self._held:
            text = self._whole.get(token_id)  # nearly always
            if text is not None:
                return text
        if token_id in self._texts.special_ids:
            return ""
        self._texts.learn_whole(token_id)
        raw = self._held + self._texts.token_bytes(token_id)
        text, settled_bytes = codecs.utf_8_decode(raw, "replace", False)
        self._held = raw[settled_bytes:]
        return text

    def push_all(self, token_ids: Sequence[int]) -> str:
        if not self._held:
            try:  # nearly always all are known
                return "".join(map(self._whole.__getitem__, token_ids))
            except KeyError:
                pass
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        return self._held.decode(errors="replace")


class WindowDetokenizer:
    """Decodes `_context` (the last settled token, since decoders strip the space of a text's first one) with `_held`."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        token = self._texts.tokenizer.id_to_token(token_id)
        if token_id in self._texts.special_ids or token is None:
            return ""
        if token_id in self._texts.marker_ids:
            text = self.finish() + token
            self._context, self._held = [], []
            return text
        self._held.append(token_id)
        in_byte_run = _BYTE_TOKEN.fullmatch(token) is not None
        if len(self._held) >= MAX_HELD_TOKENS:
            return self._settle_characters()
        text = "" if in_byte_run else self._pending(len(self._held))
        if in_byte_run or text.endswith("�"):
            return ""
        self._context, self._held = [token_id], []
        return text

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def _settle_characters(self) -> str:
        """Gives out a long run up to its last whole character."""
        ends = range(len(self._held), max(0, len(self._held) - 4), -1)
        end = next((n for n in ends if not self._pending(n).endswith("�")), len(self._held))
        text, self._held = self._pending(end), self._held[end:]
        return text

    def finish(self) -> str:
        return self._pending(len(self._held))

    def _pending(self, held_tokens: int) -> str:
        return self._decode(self._context + self._held[:held_tokens])[len(self._decode(self._context)) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._texts.tokenizer.decode(list(ids), skip_special_tokens=True) if ids else ""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (openai/gpt-2 encoder.py, `bytes_to_unicode`), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    return alphabet | {chr(256 + i): b for i, b in enumerate(others)}
