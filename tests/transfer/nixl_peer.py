"""The other process of the NIXL tests: an arena that is served until told to stop. It is a process of its own that
loads UCX itself (nothing but torch is loaded before the fork)."""

import os
from multiprocessing.connection import Connection
from typing import Any


def pattern(total_bytes: int, seed: int) -> Any:
    """Bytes that differ everywhere and between seeds."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (total_bytes,), dtype=torch.uint8, generator=generator)


def serve(conn: Connection, incarnation: str, total_bytes: int, tls: str | None, seed: int) -> None:
    """Sends its PeerArena's facts, serves reads, ends at the first message (or when the parent is gone)."""
    os.environ.pop("UCX_TLS", None)
    if tls:
        os.environ["UCX_TLS"] = tls
    os.environ["OMP_NUM_THREADS"] = "1"
    from twinflow.transfer.base import PeerArena
    from twinflow.transfer.nixl import NixlTransport, agent_name
    from twinflow.transfer.thread import TransferThread

    storage = pattern(total_bytes, seed)
    name = agent_name("prefill-0", incarnation, 1)
    transport = NixlTransport(name, storage)
    thread = TransferThread(transport, lambda event: None, serve=True)
    thread.serving(True)
    conn.send(
        PeerArena(
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
    )
    try:
        while conn.recv() == "fill":
            storage.fill_(0xEE)
            conn.send("filled")
    except EOFError:
        pass
    thread.close()
    conn.close()


BLOCK_BYTES = 96 << 10
SLOT_BYTES = 640 << 10
SLOTS = 4
