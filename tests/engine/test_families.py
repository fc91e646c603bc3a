"""Invariants 1 and 4 for every family after the first: the engine, the cache and the hand-off know none of them.

`test_equality.py` goes through all of it with the first family; here each further one takes the main roads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import transformers

from tests.engine.harness import Pair, request
from tests.models.tiny import build_reference, make_checkpoint, prompt
from twinflow.models.base import HybridModel
from twinflow.models.loader import load_model

FAMILIES = ("nemotron_h",)
LENGTHS = (1, 2, 3, 63, 64, 65, 129, 200, 333)
NEW = 10


@dataclass(frozen=True)
class Case:
    model: HybridModel
    reference: transformers.PreTrainedModel

    def greedy(self, tokens: list[int]) -> list[int]:
        """NEW greedy tokens of `transformers`, computed from the prompt alone."""
        with torch.no_grad():
            out = self.reference.generate(
                torch.tensor([tokens]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
            )  # fmt: skip
        return out[0, len(tokens) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    folder = make_checkpoint(tmp_path_factory.mktemp("family"), request.param, 0)
    return Case(load_model(str(folder)), build_reference(request.param, 0))


@pytest.fixture
def pair(case: Case) -> Iterator[Pair]:
    pair = Pair.build(case.model)
    yield pair
    pair.close()


@pytest.mark.parametrize("tokens", LENGTHS)
def test_cold_and_warm_on_either_side(case: Case, pair: Pair, tokens: int) -> None:
    p = prompt(tokens, tokens)
    want = case.greedy(p)
    runs = {
        "prefill + decode, cold": lambda: pair.remote(p, max_tokens=NEW),
        "both warm": lambda: pair.remote(p, max_tokens=NEW),
        "prefill warm": lambda: (pair.decode.flush(), pair.remote(p, max_tokens=NEW))[1],
        "decode warm": lambda: (pair.prefill.flush(), pair.remote(p, max_tokens=NEW))[1],
        "aggregated, warm": lambda: pair.decode.local(p, max_tokens=NEW),
        "aggregated, cold": lambda: (pair.decode.flush(), pair.decode.local(p, max_tokens=NEW))[1],
    }
    for name, run in runs.items():
        result = run()
        assert (name, result.error, result.tokens) == (name, "", want)
        assert pair.quiet()


def test_conversation_resumes_at_the_end_of_the_reply(case: Case, pair: Pair) -> None:
    talk, previous = prompt(1, 150), 0
    for turn in range(3):
        first = pair.remote(talk, max_tokens=NEW) if turn == 0 else pair.decode.local(talk, max_tokens=NEW)
        assert first.tokens == case.greedy(talk)
        assert first.stats.decode_resumed_tokens == previous
        previous = len(talk) + NEW - 1  # the last token of a reply was never fed
        talk = talk + first.tokens + prompt(100 + turn, 30)


def test_siblings_of_a_shared_prefix(case: Case, pair: Pair) -> None:
    shared = prompt(5, 200)
    for i in range(3):
        p = shared + prompt(50 + i, 20 + i)
        assert pair.remote(p, max_tokens=NEW).tokens == case.greedy(p)
    assert pair.quiet()


def test_many_at_once_do_not_mix(case: Case, pair: Pair) -> None:
    prompts = [prompt(i, n) for i, n in enumerate((5, 64, 130, 65, 1, 200))]
    want = [case.greedy(p) for p in prompts]
    ids = [pair.submit(p, max_tokens=NEW) for p in prompts]
    pair.drive()
    assert [pair.results[i].tokens for i in ids] == want
    root = pair.decode.root
    out = pair.decode.run([request(f"l{i}", p, root, max_tokens=NEW) for i, p in enumerate(prompts)])
    assert [out[f"l{i}"].tokens for i in range(len(prompts))] == want


@pytest.mark.parametrize("chunk", [1, 17, 64, 65])
def test_chunk_size_changes_no_token(case: Case, chunk: int) -> None:
    pair = Pair.build(case.model, chunk_tokens=chunk, step_tokens=chunk + 3)
    p = prompt(9, 140)
    assert pair.remote(p, max_tokens=NEW).tokens == case.greedy(p)
    assert pair.decode.local(p[:70], max_tokens=NEW).tokens == case.greedy(p[:70])
    pair.close()
