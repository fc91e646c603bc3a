"""Which failures a request survives, how often, and what it says in the end."""

import pytest

from services.router.dispatch.base import Untold, WorkerLost
from services.router.dispatch.recovery import MAX_MOVES, Recovery
from twinflow.contracts import errors
from twinflow.contracts.errors import TwinflowError

A, B, C = ("a", "1"), ("b", "1"), ("c", "1")


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (WorkerLost, True),
        (errors.HandoffFailed, True),
        (errors.Internal, True),
        (errors.NoCapacity, True),
        (errors.Draining, True),
        (errors.BadRequest, False),
        (errors.TooLong, False),
        (errors.DeadlineExceeded, False),
        (errors.Cancelled, False),
        (errors.Overloaded, False),
        (Untold, False),
    ],
    ids=lambda v: getattr(v, "reason", None),
)
def test_who_is_to_blame_decides(error: type[TwinflowError], goes_on: bool) -> None:
    recovery = Recovery()
    if goes_on:
        recovery.failed(error("x"), A)
        assert recovery.excluded == {A}
    else:
        with pytest.raises(error):
            recovery.failed(error("x"), A)


def test_two_moves_then_a_clear_error() -> None:
    recovery = Recovery()
    for key in (A, B):
        recovery.failed(WorkerLost("it died"), key)
    assert recovery.moves == MAX_MOVES == 2
    with pytest.raises(WorkerLost, match=r"after 3 workers failed it \(a, b, c\); the last: it died"):
        recovery.failed(WorkerLost("it died"), C)


def test_full_workers_are_no_dead_ones() -> None:
    recovery = Recovery()
    for key in (A, B):
        recovery.failed(errors.NoCapacity("full"), key)
    with pytest.raises(errors.NoCapacity, match="full") as e:
        recovery.failed(errors.NoCapacity("full"), C)
    assert e.value.http_status == 503


def test_the_culprit_is_left_out_and_not_the_messenger() -> None:
    recovery = Recovery()
    recovery.failed(WorkerLost("the prefill worker hangs", culprit=B), A)
    assert recovery.excluded == {B}


def test_nobody_else_keeps_the_first_error() -> None:
    recovery, nobody = Recovery(), errors.NoCapacity("no decode worker is usable: 1 draining")
    full = errors.NoCapacity("no memory")
    assert recovery.stranded(full, nobody) is full
    told = recovery.stranded(WorkerLost("it died"), nobody)
    assert isinstance(told, WorkerLost) and told.message == f"it died; it cannot be tried elsewhere: {nobody.message}"
