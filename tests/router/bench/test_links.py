"""Reads share what their ends can do."""

import pytest

from services.router.bench.clock import VirtualClock
from services.router.bench.links import Links, Read

SPEED = 100.0  # bytes per second


class World:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.links = Links(self.clock, SPEED)
        self.done: dict[str, float] = {}

    def read(self, name: str, source: str, target: str, size_bytes: int, at_s: float = 0.0) -> Read:
        read = Read(source, target, size_bytes, lambda: self.done.update({name: self.clock()}))
        self.clock.at(at_s, lambda: self.links.announce(read, size_bytes))
        return read


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(
    ("other", "ends_s"),
    [(("q", "e"), 1.0), (("p", "e"), 2.0), (("q", "d"), 2.0), (("p", "d"), 2.0)],
    ids=["elsewhere", "one source", "one target", "one pair"],
)
def test_two_at_once(world: World, other: tuple[str, str], ends_s: float) -> None:
    world.read("one", "p", "d", 100)
    world.read("two", *other, 100)
    world.clock.run()
    assert world.done == {"one": pytest.approx(ends_s), "two": pytest.approx(ends_s)}


def test_the_rest_goes_faster_once_the_other_has_ended(world: World) -> None:
    long = world.read("long", "p", "d", 150)
    world.read("short", "q", "d", 50)
    world.clock.run()
    assert world.done == {"short": pytest.approx(1.0), "long": pytest.approx(2.0)}
    assert long.busy_s == pytest.approx(2.0)


def test_one_that_comes_later_slows_what_runs(world: World) -> None:
    world.read("first", "p", "d", 100)
    world.read("later", "p", "e", 50, at_s=0.5)
    world.clock.run()
    assert world.done == {"first": pytest.approx(1.5), "later": pytest.approx(1.5)}


def test_a_read_is_done_when_all_of_it_was_announced_and_rests_between(world: World) -> None:
    read = Read("p", "d", 100, lambda: world.done.update(read=world.clock()))
    for at_s, size in ((0.0, 40), (0.1, 20), (5.0, 40)):
        world.clock.at(at_s, lambda size=size: world.links.announce(read, size))
    world.clock.run()
    assert world.done == {"read": pytest.approx(5.4)} and read.busy_s == pytest.approx(1.0)
