"""Who may see whose prefixes: nothing is shared, counted or named across tenants, salts and adapters."""

import pytest

from tests.cache.world import World
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash

ROOTS = {
    "salt": root_hash("f", "", "salt"),
    "tenant": root_hash("f", "tenant"),
    "adapter": root_hash("f", adapter="adapter"),
    "model": root_hash("g"),
    "shifted": root_hash("f", "t", "enant"),
}


@pytest.mark.parametrize("name", list(ROOTS))
@pytest.mark.parametrize("length", [3, 4, 9])
def test_the_same_tokens_under_another_root_are_a_miss(name, length):
    world = World(blocks=16, slots=6)
    world.serve(range(length))
    other = TokenChain(ROOTS[name], world.block_tokens, pack_tokens([*range(length), 99]))
    match = world.cache.match(other)
    assert (match.attention_tokens, match.checkpoints, match.usable_tokens) == (0, (), 0)
    holding = world.reserve(other)
    assert (holding.resumed_tokens, holding.written_tokens) == (0, 0)
    world.feed(holding)
    world.release(holding, donate=True)
    assert world.cache.match(world.chain([*range(length), 99])).usable_tokens == length  # and the first keeps its own
    world.settle()
    world.check()


def test_events_of_two_salts_share_no_hash():
    world = World(blocks=16, slots=6)
    world.serve(range(9))
    first = {e.prefix_hash for e in world.cache.snapshot()[1]}
    salted = world.reserve(TokenChain(ROOTS["salt"], world.block_tokens, pack_tokens(range(9))))
    world.feed(salted)
    world.release(salted, donate=True)
    second = {e.prefix_hash for e in world.cache.snapshot()[1]} - first
    assert len(first) == len(second) == 3
