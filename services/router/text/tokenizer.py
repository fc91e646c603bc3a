"""The model's tokenizer as the router uses it: text → ids, ids → text, which ids end a reply, how the model samples."""

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer

from services.router.text.calls.base import Tools
from services.router.text.calls.formats import AUTO, CallFormat, call_format
from services.router.text.defaults import SamplingDefaults, load_sampling_defaults
from services.router.text.detokenize import Detokenizer, TokenTexts
from services.router.text.parsed import ReplyParser, reply_parser
from services.router.text.reasoning import CLOSE, OPEN, opened_by, thinks
from services.router.text.templates import ChatTemplate, load_chat_template, read_json, special_tokens
from services.router.text.words import AT_ONCE_CHARS, Unfit, Words
from twinflow.contracts.errors import ModelError
from twinflow.contracts.hashing import pack_tokens
from twinflow.grammar.base import is_marker

LONG_TEXT_CHARS = 8_192  # above this, the library leaves the event loop (about 2 ms per 4k characters)
NICENESS = 10  # of the threads that tokenise long texts, so that tokens of running replies go first


class ModelText:
    """Everything textual of one model folder. Immutable after loading, safe to share between requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        eos_token_ids: tuple[int, ...],
        defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008  (frozen)
        calls: CallFormat | None = None,
        thinks: bool = False,
    ) -> None:
        """`calls`: how it writes tool calls, None = it does not. `thinks`: its replies have thoughts in tags."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.template = template
        self.eos_token_ids = eos_token_ids
        self.defaults = defaults
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.calls = calls
        self.thinks = thinks
        markers = {*((calls.open, calls.close) if calls is not None else ()), *((OPEN, CLOSE) if thinks else ())}
        self.texts = TokenTexts(tokenizer, frozenset(markers))
        self._words = Words.of(tokenizer)
        self._adds = tokenizer.num_special_tokens_to_add(False) > 0
        # No more than leave a core to the event loop: with many threads on few cores it would hardly ever run.
        threads = max(1, len(os.sched_getaffinity(0)) - 1)
        self._threads = ThreadPoolExecutor(threads, "tokenise", initializer=_be_nice)

    async def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Packed ids of `text`. Chat prompts pass False (the template wrote them), plain prompts True (as the tokenizer's
        post-processor does), both as `transformers` does. By the word where that is the same, else by the library, which gets
        a thread for long texts (it releases the interpreter lock)."""
        words = self._words
        if words is not None and not (add_special_tokens and self._adds) and words.fits(text):
            parts: list[bytes] = []
            try:
                if len(text) <= AT_ONCE_CHARS:
                    return words.encode_short(text)
                for ids in words.encode(text):
                    if parts:
                        await asyncio.sleep(0)  # others wait no longer than for one part
                    parts.append(ids)
                return b"".join(parts)
            except Unfit:
                pass
        if len(text) <= LONG_TEXT_CHARS:
            return pack_tokens(self.encode_now(text, add_special_tokens=add_special_tokens))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, lambda: pack_tokens(self.encode_now(text, add_special_tokens=add_special_tokens))
        )

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`, by the library."""
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)  # without offsets
        return list(encoded[0].ids)

    def token_id(self, text: str) -> int | None:
        """Of the one token that is this text."""
        return self._tokenizer.token_to_id(text)

    def marker_id(self, text: str) -> int | None:
        """Of the token that is this text, if that token is a mark: grammars have to name it then, and cannot spell it."""
        found = self._tokenizer.token_to_id(text)
        added = self._tokenizer.get_added_tokens_decoder().get(found) if found is not None else None
        return found if added is not None and is_marker(added.content, added.special) else None

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """A fresh one per generated sequence."""
        return self.texts.detokenizer()

    def parser(self, prompt: str, tools: Tools | None) -> ReplyParser:
        """A fresh one per generated sequence. `prompt`: the rendered chat."""
        return reply_parser(self.calls, tools, self.thinks, self.thinks and opened_by(prompt))


def _be_nice() -> None:
    """Linux gives every thread its own priority."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def load_model_text(folder: str | Path, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> ModelText:
    """Reads tokenizer.json, the chat template and the EOS ids. Raises ModelError that names what is missing, BadRequest for an
    unknown parser."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"no tokenizer.json in {folder}: the router needs the model's folder with its tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise ModelError(f"{path} cannot be read as a tokenizer: {e}") from e
    eos = eos_token_ids(folder, tokenizer)
    template = load_chat_template(folder)
    calls, thoughts = call_format(tool_parser, template.sources), thinks(reasoning_parser, template.sources)
    return ModelText(tokenizer, template, eos, load_sampling_defaults(folder), calls, thoughts)


def eos_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """From generation_config.json, else config.json (also of its text_config), else the tokenizer's own EOS token."""
    config = read_json(folder / "config.json")
    for source in (read_json(folder / "generation_config.json"), config, config.get("text_config") or {}):
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    eos = special_tokens(folder).get("eos_token")
    found = None if eos is None else tokenizer.token_to_id(eos)
    return () if found is None else (found,)
