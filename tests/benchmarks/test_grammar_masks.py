"""The benchmark of grammars, at its smallest: a line for each kind, with a tokenizer that is there and with a made-up one."""

import pytest

from benchmarks.grammar_masks import CASES, main


@pytest.mark.parametrize("tokenizer", [[], ["--vocab=700"]], ids=["shipped", "made-up"])
def test_a_line_for_each_kind(capsys: pytest.CaptureFixture[str], tokenizer: list[str]) -> None:
    main([*tokenizer, "--batch=3", "--steps=2", "--threads=2"])
    lines = capsys.readouterr().out.splitlines()
    assert ("700 tokens" if tokenizer else "4096 tokens") in lines[0]
    assert [line[:12].strip() for line in lines[3:]] == [case[0] for case in CASES]
