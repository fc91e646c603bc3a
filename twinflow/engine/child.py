"""Inside the engine process: build, say `Ready`, loop until told to stop or the front is gone."""

import gc
import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

import torch

from twinflow.cache.arena import Arena
from twinflow.contracts.errors import TwinflowError
from twinflow.engine.base import Ready, Report, Shutdown
from twinflow.engine.beats import Voice
from twinflow.engine.build import build_engine
from twinflow.engine.config import EngineConfig
from twinflow.engine.loop import Inbox, run_loop
from twinflow.transfer.base import Transport
from twinflow.transfer.nixl import NixlTransport

log = logging.getLogger(__name__)

SWITCH_S = 200e-6  # Python's 5 ms would keep a pull, or a command, out of a loop that computes in Python for that long


def main(config: EngineConfig, pipe: Connection) -> None:
    """Serves one front over `pipe`. Signals are the front's to handle, also those sent to the whole group: it drains, then
    sends `Shutdown`, and kills what does not end by that."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s engine %(message)s")
    sys.setswitchinterval(SWITCH_S)
    inbox: Inbox = Inbox()
    try:
        engine, ready = build_engine(config, inbox.put, _transport if config.transport == "nixl" else None)
    except (TwinflowError, ValueError) as error:
        pipe.send(Ready(error=str(error)))
        return
    gc.freeze()  # the model's objects stay; later collections need not walk them
    pipe.send(ready)
    threading.Thread(target=_receive, args=(pipe, inbox), name="inbox", daemon=True).start()
    voice = Voice(pipe)
    threading.Thread(target=voice.beat_until_closed, name="beats", daemon=True).start()

    def send(report: Report) -> None:
        try:
            voice.send(report)
        except OSError:  # the front is gone; its reader thread has already asked for shutdown
            inbox.put(Shutdown())

    run_loop(engine, inbox, send)
    engine.close()
    pipe.close()
    os._exit(0)  # a READ that never ends may keep a transport thread; nothing here is worth waiting for


def _receive(pipe: Connection, inbox: Inbox) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(Shutdown())


def _transport(agent_name: str, arena: Arena) -> Transport:
    """Also called by the transfer thread, for later generations."""
    device = arena.storage.device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # registering needs a current context, and a thread begins without one
    return NixlTransport(agent_name, arena.storage, "DRAM" if device.type == "cpu" else "VRAM", device.index or 0)
