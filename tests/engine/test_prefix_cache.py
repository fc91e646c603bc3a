"""With its prefix cache off a worker gives the same tokens, and no request finds what another left."""

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair, Worker, request
from tests.engine.test_preemption import preempted, tight
from tests.models.tiny import prompt
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork

NEW = 6


def cached(worker: Worker) -> int:
    return sum(c.cached for c in worker.engine.cache.counts().values())


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_only_with_it_decode_side_hits_spare_moving(model: HybridModel, oracle: Oracle, on: bool) -> None:
    """The prefill worker keeps its own: what is switched off is decode's alone."""
    network = LoopbackNetwork()
    pair = Pair(Worker(model, "prefill", network), Worker(model, "decode", network, prefix_cache=on))
    shared = prompt(1, 200)  # 3 full blocks and 8 tokens
    prompts = [shared + prompt(2 + k, 90) for k in range(3)]
    results = [pair.remote(p, max_tokens=NEW) for p in prompts]
    assert [r.tokens for r in results] == [oracle(p, NEW) for p in prompts]
    assert [r.stats.blocks_moved for r in results] == ([5, 2, 2] if on else [5, 5, 5])
    assert [r.stats.decode_attention_tokens for r in results][1:] == ([192, 192] if on else [0, 0])
    assert pair.decode.quiet()
    assert (cached(pair.decode) > 0) is on and cached(pair.prefill) > 0
    pair.close()


def test_off_whoever_yields_starts_over_and_loses_no_token(model: HybridModel, oracle: Oracle) -> None:
    worker = tight(model, 7, prefix_cache=False)
    prompts = [prompt(i, 70 + 10 * i) for i in range(4)]
    new = 190
    results, times = preempted(
        worker, [request(f"r{i}", p, worker.root, max_tokens=new) for i, p in enumerate(prompts)]
    )
    assert times > 0, "the pool is too large to show anything"
    assert [(results[f"r{i}"].error, results[f"r{i}"].tokens) for i in range(4)] == [
        ("", oracle(p, new)) for p in prompts
    ]
    assert worker.quiet() and cached(worker) == 0
    worker.close()


def test_off_the_same_prompt_is_computed_again(model: HybridModel, oracle: Oracle) -> None:
    worker = Worker(model, "alone", LoopbackNetwork(), prefix_cache=False)
    p = prompt(1, 150)
    for _ in range(2):
        before = worker.engine.runner.work.prefill_tokens
        assert worker.local(p, max_tokens=NEW).tokens == oracle(p, NEW)
        assert worker.engine.runner.work.prefill_tokens == before + len(p)
    assert worker.quiet()
    worker.close()
