"""Entry of the prefill service: `python -m services.prefill --model DIR --router HOST:PORT`."""

import sys
from collections.abc import Sequence

from services.prefill.config import PrefillConfig, load
from services.prefill.rpc import PrefillRole
from twinflow.engine.front import run_front, run_process
from twinflow.engine.process import ProcessEngine


async def run(config: PrefillConfig) -> None:
    """Serves until SIGINT or SIGTERM. Raises ModelError, OSError (port taken), or Internal when the engine dies."""
    await run_front(config, ProcessEngine(), lambda front: PrefillRole(front, config.max_open, config.credits))


def main(argv: Sequence[str] | None = None) -> int:
    return run_process("twinflow prefill", lambda: load(sys.argv[1:] if argv is None else argv), run)
