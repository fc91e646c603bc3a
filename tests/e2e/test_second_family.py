"""The other kind of state: a random Nemotron-H over real NIXL between processes, equal to `transformers`, cold and warm."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import Workers, start
from tests.e2e.test_heart import NEW, connect, run_all
from tests.e2e.worker_client import Generation
from tests.models.tiny import build_reference, make_checkpoint, prompt
from tests.router.conftest import write_model

LENGTHS = (1, 2, 63, 64, 65, 128, 129, 200, 333)
VOCAB = 384


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(tmp_path_factory.mktemp("nemotron"), "nemotron_h", 0, vocab_size=VOCAB)
    return write_model(made)


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    extra = (("decode", "local-max-tokens=0"), ("router", "local-max-tokens=0"))
    started = start(tmp_path_factory.mktemp("pair"), model=str(folder), prefill=1, decode=1, extra=extra)
    yield started
    assert started.cluster.stop() == []


def reference(prompts: list[list[int]]) -> list[list[int]]:
    model = build_reference("nemotron_h", 0, vocab_size=VOCAB)
    found = []
    with torch.no_grad():
        for p in prompts:
            out = model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
            found.append(out[0, len(p) :].tolist())
    return found


@pytest.mark.timeout(300)
async def test_equal_tokens_cold_and_warm(pair: Workers) -> None:
    prompts = [prompt(n, n) for n in LENGTHS]
    async with connect(pair) as w:
        decode, prefill = w["decode-0"], w["prefill-0"]
        runs: dict[str, list[Generation]] = {
            "prefill + decode, cold": await run_all(decode, [prefill], prompts, "a/"),
            "prefill + decode, warm": await run_all(decode, [prefill], prompts, "a/"),
            "one worker, cold": await run_all(decode, [], prompts, "b/"),
            "one worker, warm": await run_all(decode, [], prompts, "b/"),
        }
    want = await asyncio.to_thread(reference, prompts)
    for name, got in runs.items():
        assert [g.error for g in got] == [""] * len(got), name
        assert [g.tokens for g in got] == want, name
    cold = runs["prefill + decode, cold"]
    print(f"\ntransport {cold[0].stats.transport}")
    assert {g.stats.route for g in cold} == {"remote"} and {g.stats.slots_moved for g in cold} == {1}
    assert {g.stats.route for g in runs["one worker, warm"]} == {"local"}
