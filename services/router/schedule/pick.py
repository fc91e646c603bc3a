"""Pickers: one of several, by what they cost."""

from random import Random

import numpy as np

from services.router.schedule.base import F64


def least(costs: F64, random: Random, turn: int) -> int:
    """Equals fall at random."""
    return int(random.choice(np.flatnonzero(costs <= costs.min()).tolist()))


def next_in_turn(costs: F64, random: Random, turn: int) -> int:
    return turn % len(costs)
