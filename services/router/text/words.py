"""Text → token ids by the word: what the tokenizer's library says, for a fifth of its time.

A tokenizer cuts text into pieces by a pattern and then looks at each piece by itself. Nearly all of the library's time goes into
the cutting. Here Python's own engine cuts by the same pattern, pieces that came before are looked up, and those that did not go
to the library, all at once.

Only what both engines read in the same way is done so: tokenizers with one pattern that is made of known parts (`of` gives None
for others), and texts of characters whose classes have always been the same (`fits`). Everything else is the library's.
"""

import json
import re
import unicodedata
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tokenizers import Tokenizer, models

from twinflow.contracts.hashing import pack_tokens

MAX_WORDS = 65_536  # that are remembered, about 200 B each
MAX_WORD_CHARS = 32
AT_ONCE_CHARS = 8_192  # longer texts are done in slices
LEARN_CHARS = 8_192  # that go to the library in one slice, about 4 ms
SLICE_WORDS = 2_048  # about 1 ms

# ASCII, the rest of Latin-1, dashes and quotation marks: nothing in there changes in normal form C.
_FIT = "\0-\x7f\xa0-\xff\u2010-\u2027"
_CHARS = [chr(c) for c in range(0x2028) if re.match(f"[{_FIT}]", chr(c))]
_NONE = "\uffff"  # stands for a class that has no character in there
_SPACES = "\\t-\\r \xa0"  # in both engines but for four control characters, which are spaces to Python alone
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of a byte-level pre-tokenizer
_PART = re.compile(
    r"(?P<open>\[\^?)|(?P<close>\])|\\p\{(?P<category>[A-Z][a-z]?)\}|(?P<space>\\s)|(?P<nonspace>\\S)"
    r"|(?P<repeat>[?*+]|\{\d+(?:,\d*)?\})|\(\?i:['a-z|]+\)|\(\?[:!=]|\)|\||\\[rnt/]|[A-Za-z0-9 '\"/,<>=_~:;!@#%-]"
)


class Unfit(Exception):
    """The text is the library's, after all: the pattern leaves out something of it, which the library takes for a piece, too; or
    there is more to learn in it than others can wait for."""


class Words:
    """Of one tokenizer; made by `of`. Owned by one event loop."""

    def __init__(self, tokenizer: Tokenizer, pattern: "re.Pattern[str]") -> None:
        self._tokenizer = tokenizer
        self._pattern = pattern
        self._fit = re.compile(f"[{_FIT}]*")
        self._marks = {t.content: pack_tokens([id]) for id, t in tokenizer.get_added_tokens_decoder().items()}
        self._known = dict(self._marks)  # pieces that came, and marks, which are in no piece
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Words | None":
        """None for one that is not known to work so."""
        added = tokenizer.get_added_tokens_decoder().values()
        odd = any(t.lstrip or t.rstrip or t.single_word or not t.content for t in added)
        if odd or len({t.normalized for t in added}) > 1 or tokenizer.encode_special_tokens:
            return None
        if not isinstance(tokenizer.model, models.BPE) or tokenizer.model.dropout:
            return None
        if _state(tokenizer.normalizer).get("type", "NFC") != "NFC":
            return None
        pattern = _pattern_of(_state(tokenizer.pre_tokenizer))
        compiled = re.compile(pattern) if pattern is not None else None
        return None if compiled is None or compiled.match("") else cls(tokenizer, compiled)

    def fits(self, text: str) -> bool:
        return text.isascii() or self._fit.fullmatch(text) is not None

    def encode_short(self, text: str) -> bytes:
        """Packed ids of a text that fits, of at most `AT_ONCE_CHARS`. Raises Unfit."""
        pieces: list[str] = []
        for i, part in enumerate(self._cut.split(text)):
            if i % 2:
                pieces.append(part)
            else:
                pieces += self._pattern.findall(part)
        if len("".join(pieces)) != len(text):
            raise Unfit
        return self._ids(pieces)

    def encode(self, text: str) -> Iterator[bytes]:
        """Packed ids of any text that fits, in parts of about a millisecond each. Raises Unfit, perhaps amid them."""
        for i, part in enumerate(self._cut.split(text)):
            if i % 2:
                yield self._marks[part]
            elif len(part) <= AT_ONCE_CHARS:
                pieces = self._pattern.findall(part)
                if len("".join(pieces)) != len(part):
                    raise Unfit
                yield self._ids(pieces)
            else:
                yield from self._slices(part)

    def _slices(self, text: str) -> Iterator[bytes]:
        found, at = self._pattern.finditer(text), 0
        while pieces := [match.group() for match in islice(found, SLICE_WORDS)]:
            at += sum(map(len, pieces))
            yield self._ids(pieces)
        if at != len(text):
            raise Unfit

    def _ids(self, pieces: list[str]) -> bytes:
        try:  # nearly always all are known
            return b"".join(map(self._known.__getitem__, pieces))
        except KeyError:
            pass
        found = list(map(self._known.get, pieces))
        new = dict.fromkeys(piece for piece, ids in zip(pieces, found, strict=True) if ids is None)
        if sum(map(len, new)) > LEARN_CHARS:
            raise Unfit
        encoded = self._tokenizer.encode_batch_fast(list(new), add_special_tokens=False)
        learnt = {piece: pack_tokens(e.ids) for piece, e in zip(new, encoded, strict=True)}
        packed = b"".join([learnt[piece] if ids is None else ids for piece, ids in zip(pieces, found, strict=True)])
        if len(self._known) + len(learnt) > MAX_WORDS:
            self._known = dict(self._marks)
        self._known.update((piece, ids) for piece, ids in learnt.items() if len(piece) <= MAX_WORD_CHARS)
        return packed


def _state(part: Any) -> dict[str, Any]:
    """What a part of a tokenizer is made of, {} if there is none."""
    return json.loads(part.__getstate__()) if part is not None else {}


def _pattern_of(pre: dict[str, Any]) -> str | None:
    """By which a pre-tokenizer cuts, as Python's engine reads it. None if it does more, or is of unknown parts."""
    parts = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    last = parts[-1]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(parts) == 1:
        return _translated(_GPT2) if last["use_regex"] else None
    first = parts[0]
    if len(parts) > 2 or last["use_regex"] or first["type"] != "Split":
        return None
    if first["behavior"] != "Isolated" or first["invert"] or "Regex" not in first["pattern"]:
        return None
    return _translated(first["pattern"]["Regex"])


def _translated(pattern: str) -> str | None:
    """With classes of characters spelt out. None for a pattern of unknown parts."""
    out, at, inside, repeated = "", 0, False, False
    while at < len(pattern):
        part = _PART.match(pattern, at)
        if part is None or (part["repeat"] and repeated) or (inside and (part["open"] or part["nonspace"])):
            return None
        at, repeated = part.end(), bool(part["repeat"]) and not inside
        inside = bool(part["open"]) or (inside and not part["close"])
        if part["category"] or part["space"] or part["nonspace"]:
            chars = _class_of(part["category"]) if part["category"] else _SPACES
            out += chars if inside else f"[{'^' if part['nonspace'] else ''}{chars}]"
        else:
            out += part.group()
    return out


def _class_of(category: str) -> str:
    chars = [c for c in _CHARS if unicodedata.category(c).startswith(category)]
    return "".join(map(re.escape, chars)) or _NONE
