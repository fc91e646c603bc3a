"""What admission costs a request, in CPU time of one thread: with room, and with a long queue.

    python -m benchmarks.router_admission

Prints, for two sizes of cluster: the whole way through an idle gate (enter, placed, leave) without limits and with all of them,
one look at workers that are all full, and pushing to and popping from a queue of 1,000 requests of 50 keys.
"""

import asyncio
import random
import time
from collections.abc import Callable

from services.router.admission.base import Ask, KeyFacts
from services.router.admission.cluster import Cluster
from services.router.admission.gate import GateSettings, LocalGate
from services.router.admission.queue import FairQueue
from services.router.admission.room import Ahead
from services.router.schedule.policies import policy_named
from services.router.view.view import View
from twinflow.contracts.workers import Load, Role, WorkerRecord

MODEL = "m"
PLAIN = KeyFacts("plain")
LIMITED = KeyFacts("limited", requests_per_min=10**9, tokens_per_min=10**12, concurrent=10**6)


def cpu_us(run: Callable[[], object], rounds: int) -> float:
    started = time.process_time()
    for _ in range(rounds):
        run()
    return (time.process_time() - started) / rounds * 1e6


def cluster(prefill: int, decode: int, full: bool) -> Cluster:
    view = View()
    load = Load(total_slots=256, waiting=int(full))
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for i in range(count):
            record = WorkerRecord(f"{role.value}-{i}", "i", role, ("x:1",), MODEL, "f", 1 << 20, 1 << 20, 64, load=load)
            view.put(record)
            view.set_connected(record.key, True)
    return Cluster(view, MODEL, policy_named("cost"), 1.0)


async def through_us(key: KeyFacts, prefill: int, decode: int, rounds: int = 5000) -> float:
    idle = cluster(prefill, decode, full=False)
    gate = LocalGate(GateSettings(), idle.look, idle.check_fits, time.monotonic)
    ask = Ask(key, 1000, 100)
    started = time.process_time()
    for _ in range(rounds):
        permit = await gate.enter(ask)
        gate.placed(permit.id)
        gate.leave(permit.id, 200)
    return (time.process_time() - started) / rounds * 1e6


def queue_us() -> tuple[float, float]:
    rng = random.Random(0)
    queue: FairQueue[int] = FairQueue(5.0)

    def push() -> None:
        queue.push(f"k{rng.randrange(50)}", rng.choice([1.0, 4.0]), rng.randint(1, 30_000), rng.randint(-2, 2), 0.0, 0)

    for _ in range(1000):
        push()
    return cpu_us(push, 1000), cpu_us(queue.pop, 1000)


def main() -> None:
    print(f"{'CPU time of one thread, µs':44}{'4P4D':>8}{'64P192D':>9}")
    for title, key in (("with room, no limits", PLAIN), ("with room, all limits", LIMITED)):
        each = [asyncio.run(through_us(key, *size)) for size in ((4, 4), (64, 192))]
        print(f"{title:44}{each[0]:8.0f}{each[1]:9.0f}")
    looks = [cluster(*size, full=True) for size in ((4, 4), (64, 192))]
    each = [cpu_us(lambda c=c: c.look(Ahead()), 300) for c in looks]  # type: ignore[misc]
    print(f"{'a look at workers that are all full':44}{each[0]:8.0f}{each[1]:9.0f}")
    push, pop = queue_us()
    print(f"queue of 1,000 to 2,000 requests of 50 keys: push {push:.1f}, pop {pop:.1f}")


if __name__ == "__main__":
    main()
