"""A request whose logits are no numbers fails alone, and leaves nothing behind that another prompt would resume on."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.engine.conftest import Oracle
from tests.engine.harness import Worker
from tests.engine.harness import request as made
from tests.models.tiny import prompt
from twinflow.contracts.hashing import TokenChain, pack_tokens
from twinflow.engine import base
from twinflow.engine.base import Mode
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork

NEW = 6
CHUNK = 64


@pytest.fixture(params=[1, 2], ids=["one in flight", "two in flight"])
def flights(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def worker(model: HybridModel, flights: int) -> Iterator[Worker]:
    worker = Worker(model, "one", LoopbackNetwork(), chunk_tokens=CHUNK, steps_in_flight=flights)
    yield worker
    worker.close()


@pytest.fixture
def breaks(worker: Worker) -> Callable[[bool], None]:
    """While switched on, whatever the model computes is NaN: a passing fault of a kernel or of the device."""
    sound = worker.engine.model
    embedding = sound.embedding  # type: ignore[attr-defined]
    broken = replace(sound, embedding=torch.full_like(embedding, float("nan")))  # type: ignore[type-var]

    def switch(on: bool) -> None:
        worker.engine.runner.model = broken if on else sound

    return switch


def test_a_prompt_that_broke_once_is_computed_anew(
    worker: Worker, breaks: Callable[[bool], None], oracle: Oracle
) -> None:
    talk = prompt(1, 3 * CHUNK + 20)
    breaks(True)
    assert "NaN" in worker.local(talk, max_tokens=NEW).error
    breaks(False)
    assert set(worker.engine.cache.stored().values()) == {0}
    assert worker.quiet()
    for tokens in (talk, [*talk, 5, 6]):
        got = worker.local(tokens, max_tokens=NEW)
        assert (got.error, got.tokens) == ("", oracle(tokens, NEW))


def test_one_that_breaks_late_takes_what_it_stands_on_with_it_unless_others_do_too(
    worker: Worker, breaks: Callable[[bool], None], oracle: Oracle
) -> None:
    shared = prompt(1, 2 * CHUNK)
    one, two = shared + prompt(2, CHUNK + 5), shared + prompt(3, CHUNK + 5)
    for tokens in (one, two):
        assert worker.local(tokens, max_tokens=NEW).tokens == oracle(tokens, NEW)
    breaks(True)
    assert "NaN" in worker.local([*one, 9], max_tokens=NEW).error
    breaks(False)
    reach = {name: worker.engine.cache.match(chain(worker, tokens)) for name, tokens in (("one", one), ("two", two))}
    assert reach["one"].attention_tokens == len(shared)
    assert reach["two"].attention_tokens == len(two)
    for tokens in ([*one, 9], [*two, 9]):
        assert worker.local(tokens, max_tokens=NEW).tokens == oracle(tokens, NEW)


def test_who_shares_a_broken_prefix_fails_too_and_the_next_one_does_not(
    worker: Worker, breaks: Callable[[bool], None], oracle: Oracle
) -> None:
    """A cancelled request leaves NaN that it never came to see."""
    talk = prompt(1, 3 * CHUNK + 20)
    breaks(True)
    worker.turn(base.Submit(made("gone", talk, worker.root, max_tokens=NEW), Mode.LOCAL))
    while worker.engine.cache.stored()["attention"] < 2:
        worker.turn()
    worker.turn(base.Cancel("gone"))
    breaks(False)
    assert "NaN" in worker.local(talk, max_tokens=NEW).error
    got = worker.local(talk, max_tokens=NEW)
    assert (got.error, got.tokens) == ("", oracle(talk, NEW))


def chain(worker: Worker, tokens: list[int]) -> TokenChain:
    return TokenChain(worker.root, worker.engine.model.layout.block_tokens, pack_tokens(tokens))
