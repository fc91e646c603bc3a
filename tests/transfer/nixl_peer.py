"""The other process of the NIXL tests: an arena that is served until told to stop. It is a process of its own that
loads UCX itself (nothing but torch is loaded before the fork)."""

import os
import queue
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any


def pattern(total_bytes: int, seed: int) -> Any:
    """Bytes that differ everywhere and between seeds."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (total_bytes,), dtype=torch.uint8, generator=generator)


def serve(conn: Connection, incarnation: str, total_bytes: int, tls: str | None, seed: int) -> None:
    """Sends its PeerArena's facts, serves reads. "fill" overwrites all, "renew" opens a new transfer generation and sends its
    arena, "closed" waits until the old one is; anything else ends it (as does the parent's end)."""
    os.environ.pop("UCX_TLS", None)
    if tls:
        os.environ["UCX_TLS"] = tls
    os.environ["OMP_NUM_THREADS"] = "1"
    from twinflow.transfer.base import GenerationClosed, GenerationOpened, PeerArena, TransferEvent
    from twinflow.transfer.generations import RenewalLimits
    from twinflow.transfer.nixl import NixlTransport, agent_name
    from twinflow.transfer.thread import TransferThread

    storage = pattern(total_bytes, seed)
    name = agent_name("prefill-0", incarnation, 1)
    transport = NixlTransport(name, storage)
    events: queue.Queue[TransferEvent] = queue.Queue()

    def reopen(generation: int) -> NixlTransport:
        return NixlTransport(agent_name("prefill-0", incarnation, generation), storage)

    limits = RenewalLimits(drain_s=3.0)
    thread = TransferThread(transport, events.put, reopen=reopen, limits=limits, serve=True)
    thread.serving(True)
    arena = PeerArena(
        worker_id="prefill-0",
        incarnation=incarnation,
        generation=1,
        base_address=storage.data_ptr(),
        total_bytes=total_bytes,
        block_bytes=BLOCK_BYTES,
        slot_bytes=SLOT_BYTES,
        blocks=(total_bytes - SLOTS * SLOT_BYTES) // BLOCK_BYTES,
        slots=SLOTS,
        memory="DRAM",
        device_id=0,
        agent_name=name,
        agent_metadata=transport.agent_metadata,
    )
    conn.send(arena)
    try:
        while (said := conn.recv()) in ("fill", "renew", "closed"):
            if said == "fill":
                storage.fill_(0xEE)
                conn.send("filled")
            elif said == "renew":
                thread.renew("asked for")
                opened = events.get(timeout=20)
                assert isinstance(opened, GenerationOpened)
                conn.send(
                    replace(
                        arena,
                        generation=opened.generation,
                        agent_name=opened.agent_name,
                        agent_metadata=opened.agent_metadata,
                    )
                )
            else:
                assert isinstance(events.get(timeout=20), GenerationClosed)
                conn.send("closed")
    except EOFError:
        pass
    thread.close()
    conn.close()


BLOCK_BYTES = 96 << 10
SLOT_BYTES = 640 << 10
SLOTS = 4
