"""Entry of the decode service: `python -m services.decode --model DIR --router HOST:PORT`."""

import sys
from collections.abc import Sequence

from services.decode.config import DecodeConfig, load
from services.decode.rpc import DecodeRole
from twinflow.engine.front import run_front, run_process
from twinflow.engine.process import ProcessEngine


async def run(config: DecodeConfig) -> None:
    """Serves until SIGINT or SIGTERM. Raises ModelError, OSError (port taken), or Internal when the engine dies."""
    await run_front(config, ProcessEngine(), lambda front: DecodeRole(front, config))


def main(argv: Sequence[str] | None = None) -> int:
    return run_process("twinflow decode", lambda: load(sys.argv[1:] if argv is None else argv), run)
