"""The fence: no unconfirmed byte is used and no late read damages anyone, in every order of events."""

import pytest

from tests.transfer.fence_world import Rules, Violation, World

DEPTH = 40  # events; the search ends by itself well before


def replay(history: tuple[str, ...], rules: Rules) -> World:
    world = World(rules)
    for name in history:
        world.do(name, check=False)  # was checked when this history was found
    return world


def search(rules: Rules) -> tuple[int, set[str]]:
    """Every reachable state, breadth first. Returns their number and the names of all events tried. Raises Violation with the
    shortest history that leads to it."""
    seen = {World(rules).state()}
    frontier: list[tuple[str, ...]] = [()]
    tried: set[str] = set()
    for _ in range(DEPTH):
        reached: list[tuple[str, ...]] = []
        for history in frontier:
            world = replay(history, rules)
            for k, name in enumerate(world.actions()):
                if k:
                    world = replay(history, rules)
                tried.add(name)
                try:
                    world.do(name)
                except Violation as e:
                    raise Violation(f"{e}, after {[*history, name]}") from None
                state = world.state()
                if state not in seen:
                    seen.add(state)
                    reached.append((*history, name))
        frontier = reached
        if not frontier:
            return len(seen), tried
    raise AssertionError(f"not exhausted after {DEPTH} events")


@pytest.mark.timeout(300)
def test_every_order_of_events() -> None:
    states, tried = search(Rules())
    print(f"loopback: {states} states, events {sorted(tried)}")
    assert states > 1000
    assert {
        "P reuses",
        "D reuses",
        "copy 1",
        "half 2",
        "fail 2",
        "P ends the lease",
        "D cancels",
        "close",
        "poll",
    } <= tried


def run(*names: str, rules: Rules | None = None) -> World:
    world = World(rules or Rules())
    for name in names:
        assert name in world.actions(), (name, world.actions())
        world.do(name)
    return world


BEGIN = ("announce", "finish", "deliver to D", "deliver to D")
READ_ALL = ("copy 1", "done 1", "copy 2", "done 2", "poll")


@pytest.mark.parametrize(
    ("rules", "history", "says"),
    [
        pytest.param(
            Rules(check_pulled=False),
            (*BEGIN, "P ends the lease", "P reuses", *READ_ALL, "deliver to P", "deliver to D"),
            "not the prompt's",
            id="pulled-unchecked",
        ),
        pytest.param(
            Rules(await_confirmed=False),
            (*BEGIN, "P ends the lease", "P reuses", *READ_ALL),
            "not the prompt's",
            id="adopted-at-done",
        ),
        pytest.param(
            Rules(lease_refers=False),
            (*BEGIN, "P reuses", *READ_ALL, "deliver to P", "deliver to D"),
            "not the prompt's",
            id="leased-memory-reused",
        ),
        pytest.param(
            Rules(pin=False),
            (*BEGIN, "D cancels", "D reuses", "copy 1"),
            "overwritten by a late read",
            id="no-doomed-memory",
        ),
    ],
)
def test_each_rule_is_needed(rules: Rules, history: tuple[str, ...], says: str) -> None:
    """Without one rule there is a history that goes wrong; with all of them the same one is harmless or impossible."""
    with pytest.raises(Violation, match=says):
        run(*history, rules=rules)
    world = World(Rules())
    for name in history:
        if name in world.actions():
            world.do(name)


def test_a_hand_off_that_goes_well() -> None:
    world = run(*BEGIN, "copy 1", "done 1", "copy 2", "done 2", "poll", "deliver to P", "P reuses", "deliver to D")
    assert world.adopted
    assert set(world.pool.owner.values()) == {"request", ""}


def test_a_stale_read_is_refused() -> None:
    """P's memory got a new owner after its lease ended; the read brought that one's bytes and is discarded."""
    world = run(*BEGIN, "D cancels", "deliver to P", "P reuses", "copy 1", "done 1", "copy 2", "done 2", "poll")
    assert not world.adopted
    world = run(*BEGIN, "copy 1", "done 1", "copy 2", "done 2", "poll", "P loses the session", "P reuses")
    assert "deliver to P" not in world.actions()
    assert not world.adopted
    world.do("D loses the session")
    assert set(world.pool.owner.values()) == {""}


def test_a_late_copy_lands_in_doomed_memory() -> None:
    world = run(*BEGIN, "D cancels", "D reuses")
    assert sorted(world.pool.owner.values()).count("doomed") == 3
    world.do("copy 1")
    world.do("copy 2")
    world.do("done 1")
    world.do("poll")
    assert sorted(world.pool.owner.values()).count("doomed") == 2
    world.do("D reuses")
    world.do("copy 1")  # terminal: writes nothing
    world.do("fail 2")
    world.do("poll")
    assert "doomed" not in world.pool.owner.values()


def test_a_read_that_never_ends_stays_doomed_until_close() -> None:
    world = run(*BEGIN, "half 2", "D loses the session")
    for _ in range(3):
        world._poll()
    assert sorted(world.pool.owner.values()).count("doomed") == 3
    world.do("close")
    world.do("D reuses")
    world.do("copy 1")
    world.do("copy 2")
    assert set(world.pool.owner.values()) == {"other"}


def test_a_raising_read_fails_the_hand_off() -> None:
    world = run(*BEGIN, "copy 1", "done 1", "half 2", "fail 2", "poll")
    assert world.intake.over
    assert not world.adopted
    assert set(world.pool.owner.values()) == {""}


def test_a_confirmed_of_a_dead_session_is_ignored() -> None:
    world = run(*BEGIN, "copy 1", "done 1", "copy 2", "done 2", "poll", "deliver to P", "D loses the session")
    assert world.to_d == ["confirmed"]
    world.do("deliver to D")
    assert not world.adopted
