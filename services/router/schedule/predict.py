"""When a choice's first token is to be expected, from its terms. Pure."""

from collections.abc import Mapping

WAITING = ("wait", "slot")  # for others
WORKING = ("prefill", "transfer", "hidden", "step")


def first_token_s(terms: Mapping[str, float], waiting: bool = True) -> float | None:
    """Seconds from now; without `waiting` as if nobody else was there. None: the policy's terms are no times (those that are name
    the decode worker's step)."""
    if "step" not in terms:
        return None
    names = (*WAITING, *WORKING) if waiting else WORKING
    return max(0.0, sum(terms.get(name, 0.0) for name in names)) / 1e3
