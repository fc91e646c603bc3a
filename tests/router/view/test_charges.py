"""A worker's load out of two accounts: what it says, and what it was given since."""

import random

import pytest

from services.router.view.charges import Charges
from twinflow.contracts.workers import Load


def queued(charges: Charges, reported: int = 0, running: int = 9) -> int:
    return charges.queued_prefill_tokens(Load(running=running, queued_prefill_tokens=reported))


def test_what_is_charged_after_a_report_is_added_to_it() -> None:
    charges = Charges()
    charges.prefill("a", 1000)
    assert queued(charges, 5000) == 6000  # another router's 5,000
    charges.reported(0)
    assert queued(charges, 6000) == 6000
    charges.prefill("b", 100)
    assert queued(charges, 6000) == 6100


def test_a_late_report_hides_nothing() -> None:
    """It was on its way when the request was charged: what is known here is the least."""
    charges = Charges()
    charges.prefill("a", 1000)
    charges.reported(0)
    assert queued(charges, 0) == 1000


def test_what_is_all_ours_is_known_better_here() -> None:
    """The worker counts a waiting prompt whole; that its prefix will be there by then is known here."""
    charges = Charges()
    charges.prefill("a", 20_000)
    charges.prefill("b", 300)
    charges.reported(5_000)
    assert queued(charges, 35_000, running=2) == 15_300
    assert queued(charges, 35_000, running=3) == 35_000


def test_progress_counts_in_order() -> None:
    charges = Charges()
    charges.prefill("a", 1000)
    charges.prefill("b", 500)
    assert charges.computing_tokens(900) == 1000
    charges.reported(1200)
    assert queued(charges) == 300
    charges.prefilled("a")
    assert (queued(charges), charges.computing_tokens(300), charges.waiting_prompts) == (300, 500, 1)
    charges.prefilled("b")
    charges.prefilled("b")
    assert queued(charges) == 0 == charges.waiting_prompts
    charges.reported(300)
    assert charges.computing_tokens(1) == 0


def test_the_last_part_of_a_prompt_is_its_own_though_its_first_token_came_before_the_report() -> None:
    """It would else teach the speed of the short prompt as that of the long one behind it."""
    charges = Charges()
    charges.prefill("short", 100)
    charges.prefill("long", 20_000)
    charges.prefilled("short")
    assert queued(charges) == 20_000
    assert charges.computing_tokens(100) == 100
    assert charges.computing_tokens(5_000) == 0  # of both: that of neither
    charges.reported(100)
    assert charges.computing_tokens(5_000) == 20_000 and queued(charges) == 20_000
    charges.ended("long")
    charges.reported(20_000)
    assert queued(charges) == 0 and charges.computing_tokens(1) == 0


def test_requests_count_once() -> None:
    charges = Charges()
    for id in "abc":
        charges.run(id)
    assert charges.active_requests(Load(running=2, waiting=1)) == 6
    charges.reported(0)
    assert charges.active_requests(Load(running=2, waiting=1)) == 3
    charges.ended("a")
    charges.ended("a")
    assert charges.active_requests(Load()) == 2


@pytest.mark.parametrize("seed", range(30))
def test_all_are_ours_as_long_as_no_more_are_there_than_we_know(seed: int) -> None:
    """The count of this router's own requests, running or to be computed, against sets."""
    draw, charges = random.Random(seed), Charges()
    running, waiting = set[str](), set[str]()
    for _ in range(150):
        id = draw.choice("abcdefgh")
        match draw.randrange(5):
            case 0:
                charges.prefill(id, draw.randrange(1, 500))
                waiting.add(id)
            case 1:
                charges.prefilled(id)
                waiting.discard(id)
            case 2:
                charges.run(id)
                running.add(id)
            case 3:
                charges.ended(id)
                running.discard(id)
                waiting.discard(id)
            case 4:
                charges.reported(draw.randrange(400))
        assert charges.waiting_prompts == len(waiting)
        known, foreign = len(running | waiting), 1_000_000
        ours = charges.queued_prefill_tokens(Load(running=known, queued_prefill_tokens=foreign))
        assert ours < foreign <= charges.queued_prefill_tokens(Load(running=known + 1, queued_prefill_tokens=foreign))
