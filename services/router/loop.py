"""The event loop of the router's processes."""

import asyncio
import sys
from collections.abc import Callable


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where there is one."""
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop
