"""Which failures count, and for how long."""

import pytest

from services.router.dispatch.base import WorkerLost
from services.router.view.breakers import FAULTS, OPEN_S, Breakers, is_fault
from twinflow.contracts import errors

PAIR = ("p", "d")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_opens_after_faults_in_a_row_and_is_tried_again(clock: Clock) -> None:
    breakers = Breakers(clock)
    for _ in range(FAULTS - 1):
        breakers.failed(PAIR)
    assert not breakers.open()
    breakers.failed(PAIR)
    assert breakers.open() == {PAIR}
    clock.now_s = OPEN_S
    assert not breakers.open()  # one try
    breakers.failed(PAIR)
    assert breakers.open() == {PAIR}
    clock.now_s = 2 * OPEN_S
    breakers.worked(PAIR)
    breakers.failed(PAIR)
    assert not breakers.open()


def test_a_success_between_faults_keeps_it_closed(clock: Clock) -> None:
    breakers = Breakers(clock)
    for _ in range(10):
        breakers.failed(PAIR)
        breakers.failed(PAIR)
        breakers.worked(PAIR)
    assert not breakers.open()


def test_another_pair_and_another_incarnation_are_not_concerned(clock: Clock) -> None:
    breakers = Breakers(clock)
    for _ in range(FAULTS):
        breakers.failed(PAIR)
        breakers.failed(("q", "e"))
    breakers.forget("p")
    assert breakers.open() == {("q", "e")}


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (errors.Internal, True),
        (errors.HandoffFailed, True),
        (WorkerLost, True),
        (errors.NoCapacity, False),
        (errors.Draining, False),
        (errors.Overloaded, False),
        (errors.DeadlineExceeded, False),
        (errors.BadRequest, False),
        (errors.TooLong, False),
        (errors.Cancelled, False),
        (errors.Incompatible, False),
    ],
    ids=lambda v: getattr(v, "reason", None),
)
def test_back_pressure_is_no_fault(error: type[errors.TwinflowError], fault: bool) -> None:
    assert is_fault(error("x")) is fault
