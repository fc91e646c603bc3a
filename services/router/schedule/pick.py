"""Pickers: one of several, by what they cost."""

from collections.abc import Mapping
from random import Random

from services.router.schedule.base import T


def least(costs: Mapping[T, float], random: Random, turn: int) -> T:
    """Equals fall at random."""
    lowest = min(costs.values())
    return random.choice([name for name, cost in costs.items() if cost <= lowest])


def next_in_turn(costs: Mapping[T, float], random: Random, turn: int) -> T:
    return list(costs)[turn % len(costs)]
