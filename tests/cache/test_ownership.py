"""Memory between its release and its next use: unfinished steps, I/O, queued copies, received bytes, limits, misuse."""

import pytest

from tests.cache.world import World, make_geometry, make_layout
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.errors import BadRequest, TooLong
from twinflow.contracts.tags import StateTag


@pytest.fixture
def world():
    world = World(blocks=16, slots=4)
    yield world
    world.settle()
    world.check()


def counts(world, group="attention"):
    c = world.cache.counts()[group]
    return {"free": c.free, "cached": c.cached, "held": c.held, "doomed": c.doomed}


# -- steps and I/O


def test_released_memory_is_free_when_the_last_launched_step_is_done(world):
    holding = world.reserve(world.chain(range(6)), 2)
    world.step([(holding, 6)])
    world.cache.release(holding, donate=False)
    world.holdings.clear()
    assert counts(world) == {"free": 14, "cached": 0, "held": 2, "doomed": 0}
    assert world.reserve(world.chain([9]), 59) is None
    world.end_step()
    assert counts(world) == {"free": 16, "cached": 0, "held": 0, "doomed": 0}


def test_doomed_memory_is_counted_and_comes_back_after_the_last_unpin(world):
    holding = world.hold_prefix(world.chain(range(7)))
    assert world.complete(holding, 1)
    world.release(holding, donate=True)
    assert counts(world) == {"free": 14, "cached": 0, "held": 0, "doomed": 2}
    assert counts(world, "state")["doomed"] == 1
    world.end_io()
    assert (counts(world)["free"], counts(world, "state")["free"]) == (16, 4)


def test_received_bytes_are_used_after_adopt(world):
    world.serve([1, 2, 3, 4, 5, 6])
    holding = world.hold_prefix(world.chain([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert (len(holding.blocks), holding.written_tokens, holding.slot) == (1, 4, None)
    assert world.complete(holding)
    world.receive(holding)
    assert (holding.position, holding.written_tokens) == (9, 9)
    world.generate(holding, [20, 21])
    world.release(holding, donate=True)
    assert world.cache.match(world.chain([1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21, 22])).usable_tokens == 11


def test_a_transfer_gets_only_blocks_without_a_queued_copy():
    world = World(blocks=3, slots=3)
    world.serve([1, 2, 3, 4, 5, 6, 7], extra=0)
    cancelled = world.reserve(world.chain([1, 2, 3, 4, 5, 9]), 0)  # copies block 1 into block 2
    assert world.device.copied_blocks == [(1, 2)]
    world.release(cancelled, donate=False)
    transfer = world.hold_prefix(world.chain([9]))
    assert not world.complete(transfer, 7)
    assert world.complete(transfer, 3)
    assert transfer.blocks == [0]  # block 1 was evicted first, to leave no hole, but is not given out
    world.scribble()
    world.settle()
    world.check()


@pytest.mark.parametrize("what", ["block", "tail", "slot"])
def test_what_io_may_still_write_is_not_published(world, what):
    """A late transfer (one given up before the bytes came from elsewhere) must never end up in the tree."""
    holding = world.hold_prefix(world.chain(range(10)))
    world.complete(holding)
    late = {"block": ([holding.blocks[1]], []), "tail": ([holding.blocks[2]], []), "slot": ([], [holding.slot])}[what]
    world.cache.pin_io(*late)
    world.receive(holding)
    world.cache.commit(holding)
    world.release(holding, donate=True)
    match = world.cache.match(world.chain([*range(10), 99]))
    expected = {"block": (4, (10,)), "tail": (8, (10,)), "slot": (10, ())}[what]
    assert (match.attention_tokens, match.checkpoints) == expected
    world.doomed_io.append(late)
    world.scribble()
    assert counts(world, "state" if what == "slot" else "attention")["doomed"] == 1
    world.check()
    world.end_io()


def test_publishing_goes_on_where_io_had_stopped_it(world):
    holding = world.hold_prefix(world.chain(range(10)))
    world.complete(holding)
    late = ([holding.blocks[1]], [])
    world.cache.pin_io(*late)
    world.receive(holding)
    world.cache.commit(holding)
    assert holding.published_blocks == 1
    world.cache.unpin_io(*late)
    world.cache.commit(holding)
    assert holding.published_blocks == 2


def test_complete_is_all_or_nothing_and_gives_no_memory_that_a_copy_still_uses():
    world = World(blocks=4, slots=2)
    holding = world.reserve(world.chain(range(4)), 0)
    world.feed(holding)
    assert world.checkpoint(holding)  # queued behind the last step
    world.release(holding, donate=False)
    transfer = world.hold_prefix(world.chain([9]))
    assert not world.complete(transfer, 15)
    world.settle()
    assert world.complete(transfer, 15)


@pytest.mark.parametrize("unit", ["source", "target"])
def test_a_transfer_never_meets_a_copy_that_is_still_queued(unit):
    """The checkpoint's copy runs with the next step; a transfer that came into either slot before would be mixed with it."""
    world = World(blocks=8, slots=2)
    holding = world.reserve(world.chain(range(4)), 0)
    world.feed(holding)
    assert world.checkpoint(holding)
    world.release(holding, donate=False)
    if unit == "target":
        world.reserve(world.chain([8]), 0)  # takes the free one; the checkpoint is all that is left
    transfer = world.hold_prefix(world.chain([9]))
    assert not world.complete(transfer)
    world.settle()
    world.check()
    assert world.complete(transfer)
    world.scribble()
    world.receive(transfer)
    world.settle()
    world.check()


@pytest.mark.parametrize("wrong", ["prefix_hash", "position", "fingerprint", "empty"])
def test_adopt_refuses_another_state(world, wrong):
    chain = world.chain(range(6))
    holding = world.hold_prefix(chain)
    world.complete(holding)
    fingerprint = world.layout.fingerprint()
    tag = {
        "prefix_hash": StateTag(chain.prefix_hash(5), 6, fingerprint),
        "position": StateTag(chain.prefix_hash(6), 7, fingerprint),
        "fingerprint": StateTag(chain.prefix_hash(6), 6, "other"),
        "empty": StateTag(chain.prefix_hash(0), 0, fingerprint),
    }[wrong]
    with pytest.raises(ValueError, match="state"):
        world.cache.adopt(holding, tag)
    assert holding.position == 0
    world.end_io()


# -- a checkpoint besides the running state


def received(world, tokens, spare=None):
    """A hand-off of `tokens`, complete and confirmed, perhaps with room for a checkpoint besides."""
    holding = world.hold_prefix(world.chain(tokens))
    assert world.complete(holding)
    if spare is not None:
        assert world.take_checkpoint_slot(holding, spare) is not None
    world.receive(holding)
    world.cache.commit(holding)
    return holding


def test_a_checkpoint_that_is_received_besides_serves_siblings(world):
    holding = received(world, range(10), spare=6)
    assert world.store_checkpoint(holding, 6)
    assert holding.checkpoint_slot is None
    world.release(holding, donate=True)
    assert world.cache.match(world.chain([*range(10), 99])).checkpoints == (6, 10)
    sibling = world.reserve(world.chain([*range(7), 50, 51]))
    assert sibling.resumed_tokens == 6
    world.feed(sibling)


def test_a_received_checkpoint_that_is_there_already_is_given_back(world):
    world.serve(range(6))
    holding = received(world, range(10), spare=6)
    assert not world.store_checkpoint(holding, 6)
    world.release(holding, donate=False)
    assert counts(world, "state") == {"free": 3, "cached": 1, "held": 0, "doomed": 0}


def test_no_checkpoint_is_stored_that_io_may_still_write(world):
    holding = received(world, range(10), spare=6)
    late = ([], [holding.checkpoint_slot])
    world.cache.pin_io(*late)
    assert not world.store_checkpoint(holding, 6)
    assert world.cache.match(world.chain(range(10))).checkpoints == ()
    assert counts(world, "state")["doomed"] == 1
    world.cache.unpin_io(*late)
    assert counts(world, "state")["doomed"] == 0


def test_a_cancelled_checkpoint_is_doomed_until_its_io_ends(world):
    holding = received(world, range(10), spare=6)
    world.release(holding, donate=True)
    assert counts(world, "state") == {"free": 2, "cached": 1, "held": 0, "doomed": 1}
    world.end_io()
    assert counts(world, "state")["doomed"] == 0


def test_room_for_a_checkpoint_is_best_effort():
    world = World(blocks=8, slots=2)
    running = world.reserve(world.chain([9]), 0)
    holding = world.hold_prefix(world.chain(range(6)))
    assert world.complete(holding, 1)
    assert world.take_checkpoint_slot(holding, 4) is None
    world.release(running, donate=False)
    assert world.take_checkpoint_slot(holding, 4) is not None
    assert world.take_checkpoint_slot(holding, 4) is None  # one at a time
    while world.doomed_io:
        world.end_io()


def test_a_lent_checkpoint_stays_until_it_is_given_back(world):
    world.serve(range(6))
    reader = world.reserve(world.chain([*range(6), 7, 8]), 0)
    slot = world.lend_checkpoint(reader, 5)
    assert slot is None  # no state there
    world.feed(reader, 2)
    assert world.checkpoint(reader)
    slot = world.lend_checkpoint(reader, 8)
    assert slot is not None and world.lend_checkpoint(reader, 8) == slot
    with pytest.raises(ValueError, match="received"):
        world.cache.store_checkpoint(reader, StateTag(reader.chain.prefix_hash(8), 8, world.layout.fingerprint()))
    for i in range(6):  # nothing that comes after evicts it or takes it over
        world.serve([20 + i, 1, 2, 3, 4], extra=0)
        world.check()
    world.serve([*range(6), 7, 8, 9], extra=0)
    assert world.cache.counts()["state"].held == 2
    world.release(reader, donate=False)
    world.settle()
    assert world.cache.counts()["state"].held == 0


# -- limits and misuse


def test_what_can_never_fit_is_refused_with_the_numbers(world):
    assert world.cache.max_request_tokens() == 64
    with pytest.raises(TooLong, match=r"65 tokens needs 17 blocks of 4 tokens .* 16 blocks and 4 slots.* 64 tokens"):
        world.cache.reserve(world.chain(range(10)), 65)
    holding = world.hold_prefix(world.chain([1]))
    with pytest.raises(TooLong, match="65 tokens"):
        world.cache.complete(holding, 65)
    world.release(world.holdings[0], donate=False)


def test_no_slots_fit_nothing():
    layout = make_layout()
    cache = HybridCache(layout, make_geometry(layout, 4, 0), World().device)
    assert cache.max_request_tokens() == 0
    with pytest.raises(TooLong, match="0 slots"):
        cache.reserve(World().chain([1]), 1)


def test_feeding_ends_at_the_chain_and_at_the_reserved_blocks(world):
    holding = world.reserve(world.chain(range(4)), 0)
    world.feed(holding)
    with pytest.raises(ValueError, match="cannot feed 1 tokens at 4"):
        world.cache.advance(holding, 1)
    holding.chain.append([9])
    with pytest.raises(ValueError, match="end at 4"):
        world.cache.advance(holding, 1)


@pytest.mark.parametrize("lengths", [(4,), (1, 2, 3, 4, 5), (7, 8, 9)], ids=str)
def test_advancing_each_is_advancing_and_committing_one_by_one(lengths):
    """Prompts of `lengths` tokens and 9 generated ones each: over block boundaries, at different steps."""
    together, alone = World(blocks=40, slots=8), World(blocks=40, slots=8)
    mine, theirs = (
        [w.reserve(w.chain([i, *range(1, n)]), 9) for i, n in enumerate(lengths)] for w in (together, alone)
    )
    for world, holdings in ((together, mine), (alone, theirs)):
        for holding in holdings:
            world.feed(holding)
    for token in range(9):
        for holding in (*mine, *theirs):
            holding.chain.push(token)
        together.cache.advance_each(mine)
        for holding in theirs:
            alone.cache.advance(holding, 1)
            alone.cache.commit(holding)
        for a, b in zip(mine, theirs, strict=True):
            assert (a.position, a.written_tokens, a.published_blocks) == (
                b.position,
                b.written_tokens,
                b.published_blocks,
            )
        assert together.cache.drain_events() == alone.cache.drain_events()
        together.cache.check_integrity()


def test_advancing_each_refuses_what_advancing_refuses(world):
    fed, ended = world.reserve(world.chain(range(4)), 0), world.reserve(world.chain([7]), 4)
    world.feed(fed)
    world.feed(ended)
    with pytest.raises(ValueError, match="cannot feed 1 tokens at 4"):
        world.cache.advance_each([fed])  # at the chain's end
    fed.chain.push(9)
    with pytest.raises(ValueError, match="end at 4"):
        world.cache.advance_each([fed])  # at the reserved blocks' end
    ended.chain.push(8)
    world.release(ended, donate=False)
    with pytest.raises(ValueError, match="released"):
        world.cache.advance_each([ended])
    with pytest.raises(ValueError, match="no slot"):
        world.cache.advance_each([world.hold_prefix(world.chain([1, 2]))])
    assert (fed.position, ended.position) == (4, 1)


def test_a_released_holding_is_dead_and_release_is_idempotent(world):
    holding = world.serve([1, 2, 3])
    world.cache.release(holding, donate=True)
    for verb in (world.cache.commit, world.cache.checkpoint, lambda h: world.cache.advance(h, 1)):
        with pytest.raises(ValueError, match="released"):
            verb(holding)


def test_a_holding_is_completed_once_and_needs_its_slot_to_run(world):
    holding = world.hold_prefix(world.chain([1, 2]))
    with pytest.raises(ValueError, match="no slot"):
        world.cache.advance(holding, 1)
    assert world.complete(holding)
    with pytest.raises(ValueError, match="complete already"):
        world.cache.complete(holding, 9)
    world.end_io()


def test_a_total_shorter_than_the_prompt_is_refused(world):
    with pytest.raises(ValueError, match="less than"):
        world.cache.reserve(world.chain([1, 2, 3]), 2)


def test_a_step_cannot_end_before_it_was_launched(world):
    with pytest.raises(ValueError, match="step 7"):
        world.cache.end_step(7)


def test_flush_drops_all_that_nobody_uses_and_says_how_much(world):
    world.serve([1, 2, 3, 4, 5])
    lease = world.hold_prefix(world.chain([1, 2, 3, 4]))
    assert world.cache.flush() == 2  # the tail block and the checkpoint
    assert counts(world)["held"] == 1
    world.release(lease, donate=False)
    assert world.cache.flush() == 1


@pytest.mark.parametrize(("group", "dropped"), [("attention", 2), ("state", 1)])
def test_flush_of_one_group_leaves_the_other(world, group, dropped):
    world.serve([1, 2, 3, 4, 5])
    other = {"attention": "state", "state": "attention"}[group]
    kept = world.cache.counts()[other]
    assert world.cache.stored() == {"attention": 2, "state": 1}
    assert [world.cache.flush(group) for _ in range(2)] == [dropped, 0]
    assert world.cache.stored()[group] == world.cache.counts()[group].cached == 0
    assert world.cache.counts()[other] == kept
    world.check()
    world.serve([1, 2, 3, 4, 5])  # what was left of the path is still good to build on


def test_flush_of_an_unknown_group_is_refused(world):
    with pytest.raises(BadRequest, match=r"unknown cache group 'kv' \(known: attention, state\)"):
        world.cache.flush("kv")
