"""States that steps leave behind on their way: which get slots, when they are published, and what becomes of the rest."""

import pytest

from tests.cache.world import World
from twinflow.contracts.checkpoints import CheckpointKind

TOKENS = list(range(16))


def checkpoints(world: World) -> list[int]:
    world.check()
    return sorted(position for kind, _, position in world.snapshot() if kind == "checkpoint")


def ready(world: World, tokens: list[int] = TOKENS):
    holding = world.reserve(world.chain(tokens), 4)
    assert holding is not None
    return holding


def test_each_step_publishes_its_own_when_it_lands() -> None:
    world = World(blocks=8, slots=8)
    holding = ready(world)
    world.step([(holding, 8)], keep=[2, 4, 8])
    world.step([(holding, 8)], keep=[1, 4])
    assert list(holding.snapshots) == [2, 4, 8, 9, 12]
    assert len(holding.slots) == 6
    assert not checkpoints(world)
    world.end_step()
    assert checkpoints(world) == [2, 4, 8] and list(holding.snapshots) == [9, 12]
    world.end_step()
    assert checkpoints(world) == [2, 4, 8, 9, 12] and not holding.snapshots
    world.cache.commit(holding)
    world.release(holding, donate=False)
    for n in (3, 5, 9, 12, 14):  # resumed from each, with the content of its position
        again = ready(world, [*TOKENS[:n], 99])
        assert again.resumed_tokens == max(p for p in (2, 4, 8, 9, 12) if p <= n)
        world.settle()
        world.release(again, donate=False)
    world.check()


def test_those_worth_most_get_the_slots_that_are_there() -> None:
    world = World(blocks=8, slots=3)
    holding = ready(world)
    cuts = {4: CheckpointKind.INTERVAL, 8: CheckpointKind.JUNCTION, 12: CheckpointKind.INTERVAL}
    kept = world.cache.open_snapshots(holding, cuts)
    assert list(kept) == [8, 12]  # each as far behind the one before: the deeper ones
    world.check()
    world.release(holding, donate=False)
    world.check()
    assert world.quiet and world.cache.counts()["state"].held == 0


def test_what_the_tree_has_needs_no_slot() -> None:
    world = World(blocks=12, slots=8)
    first, second = ready(world), ready(world)
    world.step([(first, 16), (second, 16)], keep=[4, 12])
    while world.in_flight:
        world.end_step()
    assert checkpoints(world) == [4, 12]
    assert world.cache.counts()["state"].held == 2  # what the second one left at the same positions is free again
    world.cache.commit(first)
    world.release(first, donate=True)
    world.release(second, donate=False)
    third = ready(world)
    assert third.resumed_tokens == 12
    assert world.cache.open_snapshots(third, {16: CheckpointKind.BOUNDARY}) == {}
    world.settle()
    world.release(third, donate=False)
    world.check()


@pytest.mark.parametrize("end", ["cancel", "withdraw"])
def test_who_ends_in_flight_publishes_none(end: str) -> None:
    world = World(blocks=8, slots=8)
    holding = ready(world)
    world.step([(holding, 8)], keep=[4, 8])
    world.step([(holding, 8)], keep=[4])
    if end == "withdraw":
        world.cache.withdraw(holding)
    world.release(holding, donate=False)
    world.check()
    assert world.cache.counts()["state"].held == 4  # until the steps that write them have landed
    world.settle()
    assert not checkpoints(world) and world.cache.counts()["state"].held == 0


def test_positions_are_in_order_and_ahead() -> None:
    world = World(blocks=8, slots=8)
    holding = ready(world)
    world.feed(holding, 4)
    kind = CheckpointKind.INTERVAL
    for cuts in ({4: kind}, {8: kind, 6: kind}):
        with pytest.raises(ValueError, match="is no position ahead of"):
            world.cache.open_snapshots(holding, cuts)
    assert list(world.cache.open_snapshots(holding, {6: kind, 8: kind})) == [6, 8]
    with pytest.raises(ValueError, match="8 is no position ahead of 8"):
        world.cache.open_snapshots(holding, {8: kind})
    with pytest.raises(ValueError, match="lie ahead of the cursor"):
        world.cache.close_snapshots(holding, 6)
    assert world.cache.close_snapshots(holding, 4) == 0
    world.release(holding, donate=False)
    world.check()
