"""The event loop of the router's processes, and what would stop it for long."""

import asyncio
import gc
import sys
from collections.abc import Callable

YOUNG = 10_000  # new objects beyond those that have gone, between looks at them


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where there is one."""
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def spare_the_collector() -> None:
    """Once everything is built. That lives as long as the process, and looking at all of it takes a twentieth of a second in
    which nothing else runs: it is never looked at again. What requests leave is young, and little of it in cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
