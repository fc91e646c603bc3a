"""Memory of simulated workers: what runs stays, what it will need is set aside, nothing is lost or counted twice."""

import dataclasses
from random import Random

import pytest

from services.router.bench.cache import Held, SimCache
from services.router.bench.prompt import Run, RunPrompt
from tests.router.view.test_index import RECORD

BLOCK, SLOT = 100, 250
SIZED = dataclasses.replace(RECORD, block_bytes=BLOCK, slot_bytes=SLOT)
TOKENS = SIZED.block_tokens


def prompt(*ids: int) -> RunPrompt:
    """One block for each id."""
    return RunPrompt([Run(id, TOKENS) for id in ids], SIZED.fingerprint, TOKENS)


def test_what_is_held_stays_and_what_is_set_aside_is_not_there() -> None:
    cache = SimCache(SIZED, 10 * BLOCK)
    cache.store(prompt(1, 2, 3))
    held = cache.hold(prompt(1, 2, 3, 4), 3 * TOKENS, 5 * BLOCK)
    assert held is not None and cache.free_bytes == 2 * BLOCK
    cache.store(prompt(7, 8, 9))  # one more than there is room for
    assert cache.match(prompt(1, 2, 3)).reach_tokens == 3 * TOKENS
    assert cache.match(prompt(7, 8, 9)).reach_tokens == 2 * TOKENS
    assert cache.hold(prompt(5), 0, 3 * BLOCK) is None
    cache.release(held)
    assert cache.hold(prompt(5), 0, 3 * BLOCK) is not None


def test_attention_that_is_there_needs_no_new_memory() -> None:
    """Ten blocks are needed: with eight of them there it fits beside another request, without it does not."""
    warm, cold = SimCache(SIZED, 16 * BLOCK), SimCache(SIZED, 16 * BLOCK)
    ids = range(8)
    for cache in (warm, cold):
        cache.hold(prompt(99), 0, 6 * BLOCK)
    warm.store(prompt(*ids))
    cold.store(prompt(*(100 + i for i in ids)))
    assert warm.hold(prompt(*ids), 8 * TOKENS, 2 * BLOCK) is not None and warm.free_bytes == 0
    assert (
        cold.hold(prompt(*ids), 0, 10 * BLOCK) is not None
        and cold.match(prompt(*(100 + i for i in ids))).reach_tokens == 0
    )
    assert warm.hold(prompt(*ids), 8 * TOKENS, 0) is not None  # the same blocks serve both
    assert cold.hold(prompt(*ids), 0, 10 * BLOCK) is None


def test_siblings_share_what_both_received() -> None:
    cache = SimCache(SIZED, 10 * BLOCK)
    first, second = (cache.hold(prompt(1, 2), 0, 3 * BLOCK) for _ in range(2))
    assert first is not None and second is not None and cache.free_bytes == 4 * BLOCK
    cache.received(first, prompt(1, 2))
    assert cache.free_bytes == 4 * BLOCK
    cache.received(second, prompt(1, 2))
    assert (second.reserved_bytes, cache.free_bytes) == (3 * BLOCK, 4 * BLOCK)
    cache.release(first)
    cache.store(prompt(*range(50, 60)))
    assert cache.match(prompt(1, 2)).reach_tokens == 2 * TOKENS  # the second one runs on
    cache.release(second)
    assert cache.free_bytes == 10 * BLOCK


@pytest.mark.parametrize("seed", range(10), ids=lambda s: f"seed{s}")
def test_random_operations_lose_no_byte(seed: int) -> None:
    draw = Random(seed)
    cache = SimCache(SIZED, 40 * BLOCK)
    running: list[tuple[Held, RunPrompt]] = []
    for _ in range(300):
        asked = prompt(*(draw.randrange(3) for _ in range(draw.randrange(1, 8))))
        if running and draw.random() < 0.5:
            held, of = running.pop(draw.randrange(len(running)))
            if draw.random() < 0.7:
                cache.received(held, of)
            cache.release(held)
            cache.store(of, (of.tokens - 1,))
        else:
            reach = cache.match(asked).reach_tokens // TOKENS * TOKENS
            needs = (asked.tokens - reach) // TOKENS * BLOCK + SLOT
            held = cache.hold(asked, reach, needs)
            if held is not None:
                running.append((held, asked))
        stored = sum(SLOT if is_state else BLOCK for is_state, _ in cache._positions)
        assert cache._left + stored + sum(h.reserved_bytes for h, _ in running) == 40 * BLOCK
        assert cache._left >= 0
        for held, _ in running:
            assert all((False, block) in cache._positions for block in held.blocks)
    for held, _ in running:
        cache.release(held)
    assert cache.free_bytes == 40 * BLOCK
