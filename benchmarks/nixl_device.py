"""What NIXL does with memory of a GPU: what registering it costs, how fast READs are beside a plain copy, what failures do.

Two processes on one card (or on two: --peer-device cuda:1). Prints what it compares.
    python3 -m benchmarks.nixl_device [--peer-device cuda:0] [--register-gib 1,16,64,100]
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import time
from multiprocessing.connection import Connection

import torch

from twinflow.cache.device_memory import allocate
from twinflow.transfer.base import MAX_POST_BYTES, PeerArena, ReadRange, TransferError
from twinflow.transfer.nixl import NixlTransport

GIB = 1 << 30
ARENA = 4 * GIB
SHAPES = (  # what a hand-off of a 4B hybrid moves: name, bytes of a descriptor, how many
    ("16,384 tokens in blocks of 2 MiB", 2 << 20, 256),
    ("one slot", 51_511_296 // 256 * 256, 1),
    ("descriptors of 512 KiB", 512 << 10, 1024),
    ("descriptors of 64 KiB", 64 << 10, 1024),
    ("descriptors of 16 KiB", 16 << 10, 1024),
)
PATTERN, BLANK = 0x5A, 0x11


def transport(name: str, memory: torch.Tensor) -> NixlTransport:
    return NixlTransport(name, memory, "VRAM", memory.device.index or 0)


def serve(device: str, pipe: Connection) -> None:
    """The peer: an arena full of one pattern, readable until the pipe closes."""
    torch.cuda.set_device(device)
    memory = allocate(ARENA, device)
    memory.fill_(PATTERN)
    torch.cuda.synchronize()
    agent = transport(f"peer-{os.getpid()}", memory)
    pipe.send(
        PeerArena("peer", str(os.getpid()), 1, memory.data_ptr(), ARENA, ARENA, ARENA, 1, 1, "VRAM",
                  memory.device.index or 0, agent.agent_name, agent.agent_metadata)
    )  # fmt: skip
    while not pipe.poll(0.0005):
        agent.progress()


class Peer:
    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(device, theirs), daemon=True)
        self.process.start()
        self.arena: PeerArena = self.pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def posts(size: int, count: int) -> list[list[ReadRange]]:
    """Ranges in posts of at most 64 MiB, every second unit of the peer's so that nothing can be joined."""
    each = max(1, MAX_POST_BYTES // size)
    ranges = [ReadRange(2 * i * size, i * size, size) for i in range(count)]
    return [ranges[i : i + each] for i in range(0, count, each)]


def read(agent: NixlTransport, peer: Peer, work: list[list[ReadRange]]) -> float:
    """Seconds from the first post to the last DONE."""
    began = time.perf_counter()
    handles = [agent.post(peer.arena.key, ranges) for ranges in work]
    while not all(agent.poll(h) for h in handles):
        pass
    taken = time.perf_counter() - began
    for h in handles:
        agent.free(h)
    return taken


def copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes per second of one plain copy of 1 GiB."""
    a, b = target[:GIB], source[:GIB]
    a.copy_(b)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        a.copy_(b)
    torch.cuda.synchronize()
    return 10 * GIB / (time.perf_counter() - began)


def registering(sizes: list[int]) -> None:
    for gib in sizes:
        try:
            began = time.perf_counter()
            memory = allocate(gib * GIB, "cuda:0")
            allocated = time.perf_counter()
            agent = transport(f"register-{gib}", memory)
            done = time.perf_counter()
            agent.close()
            closed = time.perf_counter()
        except (MemoryError, TransferError) as error:
            print(f"register {gib} GiB: {error}")
            continue
        print(
            f"register {gib} GiB: allocating and clearing {allocated - began:.3f} s, agent and registration "
            f"{done - allocated:.3f} s, closing {closed - done:.3f} s"
        )
        del memory, agent


def rates(device: str) -> None:
    memory = allocate(ARENA, "cuda:0")
    other = allocate(2 * GIB, device)
    plain = copy_rate(memory, other)
    print(f"plain copy of 1 GiB {'on the card' if device == 'cuda:0' else 'between the cards'}: {plain / 1e9:.0f} GB/s")
    agent, peer = transport("reader", memory), Peer(device)
    agent.connect(peer.arena)
    for name, size, count in SHAPES:
        memory.fill_(BLANK)
        torch.cuda.synchronize()
        work = posts(size, count)
        first = read(agent, peer, work)
        right = bool((memory[: size * count] == PATTERN).all())
        best = min(read(agent, peer, work) for _ in range(10))
        rate = size * count / best
        print(
            f"READ {name}: first {first * 1e3:.2f} ms, best {best * 1e3:.3f} ms = {rate / 1e9:.0f} GB/s, {rate / plain:.2f} of "
            f"the plain copy, {'bytes equal' if right else 'WRONG BYTES'}, over {agent.transport_in_use(peer.arena.key)}"
        )
    peer.end()
    agent.close()


def waking(device: str) -> None:
    """A READ of one slot behind a pause, and a smaller one told so long before it."""
    memory = allocate(ARENA, "cuda:0")
    agent, peer = transport("sleeper", memory), Peer(device)
    agent.connect(peer.arena)
    slot = posts(*SHAPES[1][1:])
    for size, ahead_s in (0, 0.0), *((size, s) for size in (4 << 10, 16 << 10, 1 << 20) for s in (1e-4, 3e-4, 3e-2)):
        times = []
        for _ in range(15):
            time.sleep(0.1)
            woken = [agent.post(peer.arena.key, [ReadRange(0, ARENA - size, size)])] if size else []
            told = time.perf_counter()
            while time.perf_counter() < told + ahead_s:
                pass
            times.append(read(agent, peer, slot))
            while not all(agent.poll(h) for h in woken):
                pass
            for h in woken:
                agent.free(h)
        before = f"READ of {size >> 10} KiB {ahead_s * 1e3:.1f} ms before" if size else "nothing before"
        print(f"READ of one slot after 0.1 s, {before}: {statistics.median(times) * 1e3:.3f} ms")
    peer.end()
    agent.close()


def outcome(agent: NixlTransport, handles: list[int], seconds: float) -> str:
    end = time.perf_counter() + seconds
    try:
        while time.perf_counter() < end:
            if all(agent.poll(h) for h in handles):
                return "DONE"
            time.sleep(0.001)
    except TransferError as error:
        return f"error: {error}"
    return f"still in progress after {seconds:.1f} s"


def failures(device: str) -> None:
    work = posts(2 << 20, 512)
    for name in ("peer stopped, then continued", "peer killed before the READ", "peer killed during the READ",
                 "reader's agent closed during the READ"):  # fmt: skip
        memory = allocate(ARENA, "cuda:0")
        memory.fill_(BLANK)
        torch.cuda.synchronize()
        agent, peer = transport(f"fails-{name[:12]}-{len(name)}", memory), Peer(device)
        agent.connect(peer.arena)
        read(agent, peer, posts(64 << 10, 4))  # the connection is there
        try:
            if name.startswith("peer stopped"):
                peer.signal(signal.SIGSTOP)
                handles = [agent.post(peer.arena.key, ranges) for ranges in work]
                said = outcome(agent, handles, 2.0)
                peer.signal(signal.SIGCONT)
                said += "; continued: " + outcome(agent, handles, 2.0)
            elif name.endswith("before the READ"):
                peer.end()
                began = time.perf_counter()
                said = outcome(agent, [agent.post(peer.arena.key, ranges) for ranges in work], 5.0)
                said += f" after {time.perf_counter() - began:.3f} s"
            elif name.endswith("during the READ") and name.startswith("peer"):
                handles = [agent.post(peer.arena.key, ranges) for ranges in work]
                peer.end()
                said = outcome(agent, handles, 5.0)
            else:
                for ranges in work:
                    agent.post(peer.arena.key, ranges)
                began = time.perf_counter()
                agent.close()
                closed = time.perf_counter() - began
                torch.cuda.synchronize()
                then = int((memory == PATTERN).sum())
                time.sleep(0.5)
                torch.cuda.synchronize()
                late = int((memory == PATTERN).sum()) - then
                said = f"closing took {closed * 1e3:.1f} ms with {then >> 20} MiB written; {late} B came later"
        except TransferError as error:
            said = f"error: {error}"
        print(f"{name}: {said}")
        if peer.process.is_alive():
            peer.end()
        agent.close()
        del memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-device", default="cuda:0")
    parser.add_argument("--register-gib", default="1,16,64,100")
    args = parser.parse_args()
    torch.cuda.set_device("cuda:0")
    print(torch.cuda.get_device_name())
    registering([int(g) for g in args.register_gib.split(",")])
    rates(args.peer_device)
    waking(args.peer_device)
    failures(args.peer_device)


if __name__ == "__main__":
    main()
