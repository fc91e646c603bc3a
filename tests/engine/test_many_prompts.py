"""A wrong byte in one state of a thousand shows in no smoke test: every one of a thousand prompts through a hand-off gives the
tokens that it gives on one worker."""

import random

import pytest

from tests.engine.harness import Pair, Worker
from tests.models.tiny import prompt
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork


def compare(model: HybridModel, prompts: int) -> None:
    """Prompts of 1 to 200 tokens, some sharing a prefix with an earlier one, in an order and on caches as they come."""
    rng = random.Random(7)
    pair, alone = Pair.build(model, verify="checksum"), Worker(model, "alone", LoopbackNetwork())
    seen: list[list[int]] = []
    for k in range(prompts):
        p = prompt(k, rng.randint(1, 120))
        if seen and rng.random() < 0.3:
            earlier = rng.choice(seen)
            p = earlier[: rng.randint(1, len(earlier))] + p[:80]
        seen.append(p)
        got = pair.remote(p, max_tokens=3)
        assert got.error == "" and got.stats.route == "remote"
        assert got.tokens == alone.local(p, max_tokens=3).tokens, f"prompt {k} of {len(p)} tokens"
    assert pair.quiet() and alone.quiet()
    pair.close()
    alone.close()


def test_a_hundred_prompts_through_a_hand_off(model: HybridModel) -> None:
    compare(model, 100)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_prompts_through_a_hand_off(model: HybridModel) -> None:
    compare(model, 1000)
