"""A peer that restarts at the same address, over real NIXL: does the reader grow?

    python -m benchmarks.peer_restarts --restarts 200 --tls tcp

One process serves an arena as incarnation 1, 2, … (a new agent each time, the old one destroyed), the other connects, reads
8 MiB, compares them, and forgets it. Every tenth round it closes and reopens its own agent too, as a new transfer generation
does. Printed: resident memory and open descriptors of the reader, after a warm-up and at the end.
"""

import argparse
import json
import multiprocessing
import os
import queue
import time
from multiprocessing.connection import Connection
from typing import Any

BLOCK_BYTES, BLOCKS = 1 << 20, 8
TOTAL = BLOCK_BYTES * BLOCKS
QUIET_S, SETTLE_S = 0.5, 5.0


def serve(conn: Connection) -> None:
    """One agent per message: the incarnation's name in, its metadata and address out; None ends."""
    import torch

    from twinflow.transfer.nixl import NixlTransport, agent_name
    from twinflow.transfer.thread import TransferThread

    storage = torch.arange(TOTAL, dtype=torch.int64).to(torch.uint8)
    thread: TransferThread | None = None
    while (incarnation := conn.recv()) is not None:
        if thread is not None:
            thread.close()
        name = agent_name("prefill-0", incarnation, 1)
        transport = NixlTransport(name, storage)
        thread = TransferThread(transport, lambda event: None, serve=True)
        thread.serving(True)
        conn.send((name, transport.agent_metadata, storage.data_ptr()))
    if thread is not None:
        thread.close()


def usage() -> dict[str, int]:
    with open("/proc/self/statm") as f:
        pages = int(f.read().split()[1])
    return {"rss_kib": pages * os.sysconf("SC_PAGESIZE") // 1024, "descriptors": len(os.listdir("/proc/self/fd"))}


def settled() -> dict[str, int]:
    """Once nothing is being closed any more: some of what a destroyed agent had open goes a moment later."""
    least, began = usage(), time.monotonic()
    quiet_s, end_s = began + QUIET_S, began + SETTLE_S
    while time.monotonic() < min(quiet_s, end_s):
        time.sleep(0.02)
        now = usage()
        if now["descriptors"] < least["descriptors"]:
            least, quiet_s = now, time.monotonic() + QUIET_S
    return least


def run(restarts: int, warm: int) -> dict[str, Any]:
    """Raises AssertionError if a byte is wrong or a read fails."""
    import torch

    from twinflow.transfer.base import PeerArena, PullFinished, ReadRange
    from twinflow.transfer.nixl import NixlTransport, agent_name
    from twinflow.transfer.thread import TransferThread

    context = multiprocessing.get_context("spawn")
    conn, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    storage = torch.zeros(TOTAL, dtype=torch.uint8)
    expected = torch.arange(TOTAL, dtype=torch.int64).to(torch.uint8)
    events: queue.Queue[Any] = queue.Queue()

    def open_agent(generation: int) -> NixlTransport:
        return NixlTransport(agent_name("decode-0", "i", generation), storage)

    thread = TransferThread(open_agent(1), events.put, reopen=open_agent)
    seen: dict[int, dict[str, int]] = {}
    path = ""
    for k in range(1, restarts + 1):
        conn.send(f"i{k}")
        name, metadata, address = conn.recv()
        peer = PeerArena(
            "prefill-0", f"i{k}", 1, address, TOTAL, BLOCK_BYTES, BLOCK_BYTES, BLOCKS, 1, "DRAM", 0, name, metadata
        )
        storage.zero_()
        thread.connect(peer)
        thread.pull(f"pull-{k}", peer.key, [ReadRange(0, 0, TOTAL)])
        while not isinstance(event := events.get(timeout=60), PullFinished):
            pass
        assert event.ok, event
        assert torch.equal(storage, expected), f"restart {k}: wrong bytes"
        path = event.transport
        thread.disconnect(peer.key)
        if k % 10 == 0:
            thread.renew("measured")
        if k in (warm, restarts):
            seen[k] = settled()
    conn.send(None)
    thread.close()
    server.join(10)
    first, last = seen[warm], seen[restarts]
    grown = {what: last[what] - first[what] for what in first}
    return {"restarts": restarts, "transport": path, f"after {warm}": first, "at the end": last, "grown": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--warm", type=int, default=40)
    parser.add_argument("--tls", default="", help="UCX_TLS of both processes, e.g. tcp; default: UCX's own choice")
    args = parser.parse_args()
    if args.tls:
        os.environ["UCX_TLS"] = args.tls
    print(json.dumps(run(args.restarts, args.warm)))


if __name__ == "__main__":
    main()
