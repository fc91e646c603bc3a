"""When a choice's first token is to be expected, from its terms. Pure."""

from collections.abc import Mapping

WAITING = ("wait", "slot")  # for others
WORKING = ("prefill", "step")  # it waits for nothing that is read
ALL = (*WAITING, *WORKING)


def first_token_s(terms: Mapping[str, float], waiting: bool = True) -> float | None:
    """Seconds from now; without `waiting` as if nobody else was there. None: the policy's terms are no times (those that are name
    the decode worker's step)."""
    if "step" not in terms:
        return None
    total_ms = 0.0
    for name in ALL if waiting else WORKING:
        total_ms += terms.get(name, 0.0)
    return max(0.0, total_ms) / 1e3
