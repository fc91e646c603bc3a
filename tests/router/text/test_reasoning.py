"""Thoughts are told apart from the answer, wherever the text is cut."""

import pytest

from services.router.text.calls.base import CallEnded, CallStarted, Reasoning, Text, Tools
from services.router.text.calls.formats import call_format
from services.router.text.detokenize import TokenTexts
from services.router.text.parsed import reply_parser
from services.router.text.reasoning import ReasoningSplitter, opened_by, thinks
from tests.router.conftest import build_tokenizer
from tests.router.text.test_detokenize import byte_fallback_tokenizer
from twinflow.contracts.errors import BadRequest


def split(text: str, inside: bool, size: int) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside)
    parts = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)] + [splitter.finish()]
    return "".join(r for r, _ in parts), "".join(a for _, a in parts)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "answer"),
    [
        ("<think>\nso\n\nit is\n</think>\n\nyes\n", False, "so\n\nit is", "yes\n"),
        ("so\n</think>\n\nyes", True, "so", "yes"),
        ("\n<think>so</think>yes", False, "so", "yes"),
        ("<think>\n\n</think>\n\nyes", False, "", "yes"),
        ("yes <think>no</think>", False, "", "yes <think>no</think>"),
        ("<thin", False, "", "<thin"),
        ("\n\nyes", False, "", "\n\nyes"),
        ("never ends </thi", True, "never ends </thi", ""),
        ("a </think> b </think> c", True, "a ", " b </think> c"),
        ("", True, "", ""),
        ("  ", False, "", "  "),
    ],
)
def test_split(text, inside, reasoning, answer, size):
    assert split(text, inside, size) == (reasoning, answer)


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [("…assistant\n<think>\n", True), ("…<think>\n\n</think>\n\n", False), ("…assistant\n", False), ("<think>", True)],
)
def test_the_prompt_may_have_opened_the_thoughts(prompt, inside):
    assert opened_by(prompt) is inside


def test_the_template_tells_whether_there_are_thoughts():
    assert thinks("auto", ("a", "x</think>")) and not thinks("auto", ("a",))
    assert thinks("think", ()) and not thinks("none", ("</think>",))
    with pytest.raises(BadRequest, match="'deep'"):
        thinks("deep", ())


def test_calls_count_only_outside_of_thoughts():
    call = '<tool_call>{"name": "f"}</tool_call>'
    parser = reply_parser(call_format("hermes", ()), Tools([{"function": {"name": "f"}}]), True, True)
    events = parser.push(f"{call}</think>{call}") + parser.finish()
    assert events[0] == Reasoning(call)
    assert [type(e) for e in events if isinstance(e, CallStarted | CallEnded)] == [CallStarted, CallEnded]
    assert not any(isinstance(e, Text) for e in events)


def test_without_either_text_passes_through():
    parser = reply_parser(call_format("hermes", ()), None, False, False)
    assert parser.push(" <tool_call> ") == [Text(" <tool_call> ")] and parser.finish() == []


def test_markers_are_shown_though_they_are_special_tokens():
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(["<|tool_call|>"])
    ids = tokenizer.encode("a<|im_start|><|tool_call|>b").ids
    for markers, shown in ((frozenset({"<|tool_call|>"}), "a<|tool_call|>b"), (frozenset(), "ab")):
        assert decoded(TokenTexts(tokenizer, markers), ids) == shown


def test_markers_are_shown_by_other_decoders_too():
    """Also right behind a run of bytes that no character has ended."""
    tokenizer = byte_fallback_tokenizer()
    tokenizer.add_special_tokens(["</think>"])
    id = tokenizer.token_to_id
    ids = [
        id("▁hello"),
        id("<0xE6>"),
        id("<0x97>"),
        id("<0xA5>"),
        id("</s>"),
        id("</think>"),
        id("▁world"),
        id("▁hello"),
    ]
    assert decoded(TokenTexts(tokenizer, frozenset({"</think>"})), ids) == "hello日</think>world hello"
    assert decoded(TokenTexts(tokenizer), ids) == tokenizer.decode(ids) == "hello日 world hello"


def decoded(texts: TokenTexts, ids: list[int]) -> str:
    detokenizer = texts.detokenizer()
    return "".join(map(detokenizer.push, ids)) + detokenizer.finish()
