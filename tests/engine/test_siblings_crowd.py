"""Several families of prompts at once, strangers among them, and no room for states: who waits for whom, and in what order."""

from typing import Any

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Worker, request
from tests.models.tiny import prompt
from twinflow.contracts.requests import GenerateRequest
from twinflow.engine import base
from twinflow.engine.base import Mode
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork

SHARED, OWN, NEW = 640, 40, 3  # tokens; ten blocks are shared


def siblings(count: int, seed: int = 1) -> list[list[int]]:
    return [prompt(seed, SHARED) + prompt(100 * seed + k, OWN) for k in range(count)]


def worker(model: HybridModel, **config: Any) -> Worker:
    budget = 24 * model.layout.slot_bytes + 128 * model.layout.block_bytes
    values: dict[str, Any] = {"cache_bytes": budget, "chunk_tokens": 128, "step_tokens": 512, **config}
    return Worker(model, "w", LoopbackNetwork(), **values)


def requests(w: Worker, prompts: list[list[int]], new: int = NEW) -> list[GenerateRequest]:
    return [request(w.next_id(), p, w.root, max_tokens=new) for p in prompts]


def computed(w: Worker) -> int:
    """Tokens of prompts."""
    return w.engine.runner.work.prefill_tokens


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_siblings_share_is_computed_once(model: HybridModel, oracle: Oracle, steps_in_flight: int) -> None:
    w = worker(model, steps_in_flight=steps_in_flight)
    both = [p for pair in zip(siblings(3, 1), siblings(3, 2), strict=True) for p in pair]  # two families, in turns
    asked = requests(w, both)
    results = w.run(asked)
    assert computed(w) == 2 * (SHARED + 3 * OWN)
    for one, p in zip(asked, both, strict=True):
        assert results[one.id].tokens == oracle(p, NEW)
    assert w.quiet()
    w.close()


def test_who_shares_nothing_goes_on_past_those_that_wait(model: HybridModel) -> None:
    w = worker(model)
    asked = requests(w, [*siblings(3), prompt(9, 30)], new=1)
    ended: list[str] = []
    notices = w.turn(*(base.Submit(r, Mode.LOCAL) for r in asked))
    while len(ended) < 4:
        ended += [n.id for n in notices if isinstance(n, base.Done)]
        notices = w.turn()
    assert ended[0] == asked[3].id, "the short one"
    assert ended[1:] == [r.id for r in asked[:3]], "they keep their order"
    w.close()


def test_without_room_for_states_nobody_waits_for_ever(model: HybridModel, oracle: Oracle) -> None:
    w = worker(
        model,
        checkpoint_slots=0,
        max_running=2,
        cache_bytes=2 * model.layout.slot_bytes + 64 * model.layout.block_bytes,
    )
    prompts = siblings(5)
    asked = requests(w, prompts)
    results = w.run(asked)
    for one, p in zip(asked, prompts, strict=True):
        assert results[one.id].tokens == oracle(p, NEW)
    assert w.quiet()
    w.close()
