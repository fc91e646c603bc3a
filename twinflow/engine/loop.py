"""The engine's thread: an inbox that anybody may put into, turns until shutdown, reports out.

A report of nothing but other counts waits for a lull: what comes next is not to wait for its being sent, and will say the
same.
"""

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import replace

from twinflow.engine.base import Report
from twinflow.engine.core import Engine, Inbound

log = logging.getLogger(__name__)

Inbox = queue.SimpleQueue[Inbound]

WAIT_S = 0.5  # how long an engine with nothing to compute sleeps before it looks at its deadlines
LULL_S = 0.005  # nothing to compute and nothing in the inbox
CHECK_AFTER_S = 2.0  # quiet for so long: walk the whole cache once


def run_loop(engine: Engine, inbox: Inbox, send: Callable[[Report], None]) -> None:
    """Turns until `Shutdown`. `send` is called from this thread."""
    checked = True
    quiet_since = time.monotonic()
    busy_s, steps = 0.0, 0
    held: Report | None = None
    while not engine.stopping:
        inbound = _drain(inbox, 0.0 if engine.busy else WAIT_S if held is None else LULL_S)
        began_s = time.monotonic()
        report, held = engine.turn(inbound) or held, None
        if report is not None:
            if report.work.steps > steps:
                busy_s, steps = busy_s + time.monotonic() - began_s, report.work.steps
            elif inbound and not (engine.busy or report.notices or report.events):
                held = report
            if held is None:
                send(replace(report, busy_s=busy_s))
        if inbound or engine.busy:
            checked, quiet_since = False, time.monotonic()
        elif not checked and engine.idle and time.monotonic() - quiet_since > CHECK_AFTER_S:
            checked = True
            _check(engine)


def _drain(inbox: Inbox, wait_s: float) -> list[Inbound]:
    """Everything in the inbox; waits up to `wait_s` for the first one."""
    inbound: list[Inbound] = []
    try:
        inbound.append(inbox.get(block=wait_s > 0, timeout=wait_s or None))
        while True:
            inbound.append(inbox.get_nowait())
    except queue.Empty:
        return inbound


def _check(engine: Engine) -> None:
    try:
        engine.cache.check_integrity()
    except AssertionError:
        log.exception("cache integrity is broken; restart this worker and report the message above")
