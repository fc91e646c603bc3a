"""The real library over the tokenizer of the shipped model; replies are drawn at random from what the masks allow."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from twinflow.contracts.requests import Grammar, GrammarKind, SamplingParams
from twinflow.grammar.base import words_of
from twinflow.grammar.guide import Guide
from twinflow.grammar.llguidance import LlguidanceCompiler

MODEL = Path("models/twinflow-tiny")
EOS = (2, 0)
VOCAB = 4096

Write = Callable[..., str]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="session")
def compiler() -> LlguidanceCompiler:
    return LlguidanceCompiler(MODEL / "tokenizer.json", VOCAB, EOS)


def grammar(kind: str, text: str, **more: object) -> Grammar:
    return Grammar(GrammarKind(kind), text, **more)  # type: ignore[arg-type]


def allowed(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def draw(
    compiler: LlguidanceCompiler, of: Grammar, seed: int, most: int = 400, prefers: frozenset[int] = frozenset()
) -> list[int]:
    """Token ids of one reply, without the ending one; fewer than `most` unless it was cut. `prefers`: drawn nine times in ten
    where they may be, so that texts end."""
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=most, seed=0, grammar=of, eos_token_ids=EOS)
    guide = Guide(compiler.compile(of).start(), params, EOS)
    row = np.zeros(words_of(VOCAB), dtype=np.int32)
    reply: list[int] = []
    while len(reply) < most and not guide.complete:
        guide.fill(reply, row)
        assert guide.error is None, guide.error
        may = allowed(row)
        short = [t for t in may if t in prefers or t in EOS]
        token = rng.choice(short if short and rng.random() < 0.9 else may)
        if token in EOS:
            break
        reply.append(token)
        guide.follow(reply)
    assert guide.error is None, guide.error
    return reply


@pytest.fixture(scope="session")
def write(compiler: LlguidanceCompiler, tokenizer: Tokenizer) -> Write:
    """A whole text of a grammar, by seed."""
    ends = frozenset(i for i in range(VOCAB) if set(tokenizer.decode([i], skip_special_tokens=False)) & set('"}],\n'))

    def write(of: Grammar, seed: int = 0, most: int = 2000) -> str:
        reply = draw(compiler, of, seed, most, ends)
        assert len(reply) < most, "it did not end"
        return str(tokenizer.decode(reply, skip_special_tokens=False))

    return write
