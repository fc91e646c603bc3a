"""The executor: llguidance over the model's tokenizer.

Markers (`base.is_marker`) are no text here: they get names that no grammar can spell, so a string may hold the characters
"<|im_end|>" without ending the reply.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from twinflow.contracts.errors import BadRequest, ModelError
from twinflow.contracts.requests import Grammar, GrammarKind
from twinflow.grammar.base import JSON_SPACE, Compiled, Matcher, Row, TooComplex, is_marker, words_of
from twinflow.grammar.finite import has_an_end

MAX_TEXT_BYTES = 1 << 18
MAX_GRAMMAR_BYTES = 1 << 16  # of Lark and GBNF, which are read in Python
MAX_MASK_S = 0.25  # of CPU, for one mask: a thousand times what one takes as a rule
MAX_ERROR_CHARS = 300


class LlguidanceCompiler:
    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's: it may have more rows than the tokenizer has tokens. Takes about a second for a large
        vocabulary. Raises ModelError."""
        self.vocab_size = vocab_size
        if not eos_token_ids:
            raise ModelError("a model without an ending token cannot be held to a grammar")
        try:
            known = json.loads(tokenizer_file.read_text(encoding="utf-8"))
            self._tokenizer = LLTokenizer(
                json.dumps(with_hidden_markers(known)), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ModelError(f"{tokenizer_file} cannot be used for structured outputs: {e}") from e
        self._limits = LLParserLimits(verbose_errors=False)

    def compile(self, grammar: Grammar) -> Compiled:
        size = len(grammar.text.encode())
        most = MAX_GRAMMAR_BYTES if grammar.kind is GrammarKind.GRAMMAR else MAX_TEXT_BYTES
        if size > most:
            raise TooComplex(f"{grammar.field}: {size} bytes, at most {most}", param=grammar.field)
        try:
            source = _source(grammar)
        except RecursionError:
            raise TooComplex(f"{grammar.field}: nested too deeply", param=grammar.field) from None
        except Exception as e:  # its GBNF reader raises bare ones
            raise BadRequest(f"{grammar.field}: {_short(str(e))}", param=grammar.field) from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise BadRequest(f"{grammar.field}: {_short(matcher.get_error())}", param=grammar.field)
        compiled = CompiledText(matcher, grammar.field)
        compiled.check(self.vocab_size)
        return compiled


class CompiledText:
    def __init__(self, matcher: LLMatcher, field: str) -> None:
        """`matcher` stands at the beginning and stays there."""
        self._matcher = matcher
        self._field = field

    def start(self) -> Matcher:
        return LlguidanceMatcher(self._matcher.deep_copy(), self._field)

    def check(self, vocab_size: int) -> None:
        """Raises BadRequest unless a reply can begin."""
        row = np.zeros(words_of(vocab_size), dtype=np.int32)
        matcher = self._matcher.deep_copy()
        try:
            LlguidanceMatcher(matcher, self._field).fill(row)
        except TooComplex:
            if "NoExtension" not in matcher.get_error():  # that is, nothing can come
                raise
            row[:] = 0
        if not row.any():
            raise BadRequest(f"{self._field}: no text fulfils it", param=self._field)


class LlguidanceMatcher:
    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._matcher = matcher
        self._field = field

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            told = _short(self._matcher.get_error())
            raise BadRequest(
                f"{self._field}: the reply left its grammar at token {token_id}: {told}", param=self._field
            )

    def fill(self, row: Row) -> None:
        began_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        took_s = time.thread_time() - began_s
        if self._matcher.is_error():
            raise TooComplex(f"{self._field}: {_short(self._matcher.get_error())}", param=self._field)
        if took_s > MAX_MASK_S:
            raise TooComplex(
                f"{self._field}: what may come next took {took_s:.2f} s to find, at most {MAX_MASK_S:g} s",
                param=self._field,
            )


def with_hidden_markers(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json whose markers have other names, and the same ids."""
    vocab = tokenizer["model"]["vocab"]
    for token in tokenizer.get("added_tokens") or ():
        name, id = token["content"], token["id"]
        if not is_marker(name, token["special"]):
            continue
        hidden = f"<|\ue000{id}\ue000|>"
        if isinstance(vocab, dict):
            if vocab.pop(name, None) is not None:
                vocab[hidden] = id
        elif id < len(vocab):
            vocab[id][0] = hidden
        token["content"], token["special"] = hidden, True
    tokenizer["post_processor"] = None  # it refers to them by name, and adds nothing inside a reply
    return tokenizer


def _source(grammar: Grammar) -> str:
    """In the library's own form. Raises whatever the library does for a text that it cannot read."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            if not has_an_end(json.loads(grammar.text)):
                raise ValueError("no text fulfils it: required parts contain themselves")
            options: Any = {"lenient": grammar.lenient, "whitespace_pattern": JSON_SPACE}
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            options = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
            return LLMatcher.grammar_from_lark(f"start: {options}")
        case GrammarKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))


def _short(text: str) -> str:
    text = " ".join(text.replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 1] + "…"
