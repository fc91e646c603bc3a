"""Stop strings never leak, whatever the chunk borders."""

import random

import pytest

from services.router.text.stops import StopMatcher

CASES = [
    ("plain", "hello STOP world", ["STOP"], "hello ", "STOP"),
    ("first-of-two", "a<b>c</b>", ["</b>", "<b>"], "a", "<b>"),
    ("multi-byte", "größe 日本語 bitte", ["日本"], "größe ", "日本"),
    ("emoji", "x😀y", ["😀"], "x", "😀"),
    ("almost", "ST STO S", ["STOP"], "ST STO S", None),
    ("overlap", "aaab", ["aab"], "a", "aab"),
    ("at-once", "STOP", ["STOP"], "", "STOP"),
    ("none", "anything", [], "anything", None),
    ("newlines", "one\n\ntwo", ["\n\n"], "one", "\n\n"),
]


def run(chunks: list[str], stops: list[str]) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops)
    out = [matcher.push(c) for c in chunks]
    out.append("" if matcher.matched is not None else matcher.finish())
    return out, matcher


@pytest.mark.parametrize(("text", "stops", "shown", "matched"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_every_split(text, stops, shown, matched):
    draw = random.Random(text)
    splits = [[text], list(text)]
    for _ in range(50):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(3))
        splits.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    for chunks in splits:
        out, matcher = run(chunks, stops)
        assert ("".join(out), matcher.matched) == (shown, matched), chunks


def test_holds_back_only_what_may_begin_a_stop():
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("ok\n") == "ok"
    assert matcher.push("more") == "\nmore"


def test_nothing_after_a_match():
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == "a"
    assert matcher.push("c") == "" and matcher.finish() == ""
