"""A reply's text is the same however its tokens come: one by one, gathered, or with logprobs beside them."""

import random
from pathlib import Path

import pytest

from services.router.text.reply import Reply
from services.router.text.tokenizer import ModelText, load_model_text
from twinflow.contracts.requests import FinishReason, Sample, TokenLogprobs


@pytest.fixture(scope="module")
def text() -> ModelText:
    return load_model_text(Path(__file__).parents[3] / "models" / "twinflow-tiny")


def told(reply: Reply, batches: list[list[Sample]]) -> tuple[str, str | None, int, bool]:
    shown = "".join(reply.push(batch).text for batch in batches)
    return shown, reply.finish, reply.completion_tokens, reply.matched_stop


def cut(draw: random.Random, samples: list[Sample]) -> list[list[Sample]]:
    places = sorted(draw.randrange(len(samples) + 1) for _ in range(4))
    return [samples[a:b] for a, b in zip([0, *places], [*places, len(samples)], strict=True)]


@pytest.mark.parametrize("finish", [*FinishReason, None], ids=lambda f: f.name if f else "amid")
@pytest.mark.parametrize("ends", ["stop id", "another id"])
def test_plain_and_with_logprobs(text, finish, ends):
    draw = random.Random(f"{finish} {ends}")
    split = [i for part in ("😀", "日本") for i in text.encode_now(part, add_special_tokens=False)]
    for _ in range(60):
        ids = [draw.choice([*split, draw.randrange(text.vocab_size)]) for _ in range(draw.randrange(1, 20))]
        stop_ids = frozenset({ids[-1]} if ends == "stop id" else ())
        samples = [*map(Sample, ids[:-1]), Sample(ids[-1], finish)]
        wordy = [Sample(s.token_id, s.finish, TokenLogprobs(-0.5)) for s in samples]
        plain = told(Reply(text, (), stop_ids), cut(draw, samples))
        assert plain == told(Reply(text, (), stop_ids), [[s] for s in samples])
        assert plain == told(Reply(text, (), stop_ids, logprobs=True), cut(draw, wordy))
        assert plain == told(Reply(text, ("\0never",), stop_ids), cut(draw, samples)) or finish is None


def test_nothing_follows_an_end(text):
    reply = Reply(text, (), frozenset())
    ids = text.encode_now("one two", add_special_tokens=False)
    first = reply.push([Sample(ids[0], FinishReason.LENGTH)])
    assert first.finish == "length" and first.text
    assert reply.push([Sample(ids[1])]).text == "" and reply.completion_tokens == 1
