"""A decode worker is lost in the middle of an answer: the router takes it to another one, which draws the very same tokens."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.flow.conftest import Flow, run_flow
from tests.flow.test_flow import Oracle, body, text_of
from tests.models.tiny import prompt
from twinflow.engine.sequence import Phase

NEW = 200
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.1}


def decoding(flow: Flow) -> str | None:
    """The decode worker that has drawn a few tokens of a reply, and not all of them."""
    for name, engine in flow.engines.items():
        for sequence in list(engine.sequences.values()):
            if name != "p" and sequence.phase is Phase.RUNNING and 5 < len(sequence.generated) < NEW - 50:
                return name
    return None


async def ask(flow: Flow, ids: list[int], lose: int, **more: Any) -> tuple[str, dict[str, Any], list[str]]:
    """Text, the final usage, and the workers that were lost: each ends its routers' streams in the middle."""
    request = body(ids, max_tokens=NEW, stream=True, stream_options={"include_usage": True}, **more)
    lost: list[str] = []
    async with httpx.AsyncClient(base_url=flow.url, timeout=60) as http:
        task = asyncio.create_task(http.post("/v1/completions", json=request))
        while len(lost) < lose:
            await flow.until(lambda: task.done() or decoding(flow) not in (None, *lost), "the reply has begun")
            assert not task.done(), f"it ended early: {task.result().text[-300:]}"
            name = decoding(flow)
            assert name is not None
            flow.fronts[name].routers.close()
            lost.append(name)
        answer = await task
    assert answer.status_code == 200, answer.text
    lines = [json.loads(x.removeprefix("data: ")) for x in answer.text.split("\n\n") if x.startswith("data: {")]
    assert not any("error" in line for line in lines), lines[-1]
    text = "".join(line["choices"][0]["text"] for line in lines if line["choices"])
    return text, lines[-1]["usage"], lost


@pytest.mark.parametrize("lose", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_the_same_tokens_as_without_a_fault(
    checkpoint: Path, oracle: Oracle, sampling: dict[str, Any], lose: int
) -> None:
    ids = prompt(3, 150)
    tokens = await asyncio.to_thread(oracle, ids, NEW) if sampling is GREEDY else []
    async with run_flow(checkpoint, more_decode=("e", "f")) as flow:
        want, usage, _ = await ask(flow, ids, 0, **sampling)
        assert usage["completion_tokens"] == NEW
        if sampling is GREEDY:
            assert want == text_of(flow, tokens)
        got, usage, lost = await ask(flow, ids, lose, **sampling)
        assert got == want
        assert usage["completion_tokens"] == NEW and usage["prompt_tokens"] == len(ids)
        assert len(set(lost)) == lose
        await flow.clean()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_reply_in_a_grammar_keeps_its_place(checkpoint: Path, sampling: dict[str, Any]) -> None:
    """Groups of three: a worker that began the grammar anew would break one of them."""
    ids, held = prompt(4, 150), sampling | {"structured_outputs": {"regex": "([0-9a-f]{3}-){300}"}}
    async with run_flow(checkpoint, more_decode=("e",)) as flow:
        want, _, _ = await ask(flow, ids, 0, **held)
        got, usage, lost = await ask(flow, ids, 1, **held)
        assert re.fullmatch("([0-9a-f]{3}-)*[0-9a-f]{0,3}", got) and len(got) > 50
        assert (got, usage["completion_tokens"], len(lost)) == (want, NEW, 1)
        await flow.clean()
