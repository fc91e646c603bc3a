"""The two workers that `twinflow bench handoff` times: whole processes on this machine, without a router."""

import argparse
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from services.cli.cluster import Cluster, ClusterPlan, ProcessDied, free_ports
from services.cli.process import ProcessSpec
from services.cli.serve import PARENT_ENV
from services.cli.topology import LOOPBACK
from twinflow.contracts.errors import Internal

if TYPE_CHECKING:
    from twinflow.bench.handoff import Shooter

READY_S, ANSWER_S = 600.0, 600.0  # a large model loads and compiles, a CPU computes a long prompt
PROMPTS_HELD = 3  # how many whole prompts an arena has room for
MORE_TOKENS = 512  # of a request beside its prompt: what it generates, and what it has ahead
RUNNING, SLOTS = 4, 8  # slots to run in, and for checkpoints


@asynccontextmanager
async def workers(args: argparse.Namespace, chunk_tokens: int) -> "AsyncIterator[Shooter]":
    """A prefill and a decode worker that serve, and what shoots between them. Raises Internal if one ends."""
    from twinflow.bench.client import reach
    from twinflow.bench.handoff import Shooter

    ports = dict(zip(("prefill-0", "decode-0"), free_ports(2), strict=True))
    specs = tuple(spec(args, name, port, chunk_tokens) for name, port in ports.items())
    with Cluster(ClusterPlan(specs, "")) as cluster:
        cluster.start_all()
        try:
            async with AsyncExitStack() as stack:
                made = {name: await reach(f"{LOOPBACK}:{port}", READY_S, cluster.check) for name, port in ports.items()}
                for worker in made.values():
                    stack.push_async_exit(worker)
                yield Shooter(made["prefill-0"], made["decode-0"], ANSWER_S)
        except ProcessDied as died:
            raise Internal(f"{died}: {' | '.join(died.tail[-3:])}") from None


def spec(args: argparse.Namespace, name: str, port: int, chunk_tokens: int) -> ProcessSpec:
    service = name.partition("-")[0]
    options = {
        "model": args.model,
        "worker-id": name,
        "port": port,
        "metrics-port": -1,
        "engine.load-format": args.load_format,
        "engine.dtype": args.dtype,
        "engine.state-dtype": args.state_dtype,
        "engine.device": args.prefill_device if service == "prefill" else args.decode_device,
        "engine.block-tokens": args.block_tokens,
        "engine.cache-bytes": args.cache_bytes,
        "engine.max-running": RUNNING,
        "engine.checkpoint-slots": SLOTS,
        "engine.step-tokens": chunk_tokens,
        "engine.chunk-tokens": chunk_tokens,
        "engine.checkpoint-interval-tokens": 2 * args.tokens,  # none inside the prompt: a chunk ends there
        "engine.verify": args.verify,
    }
    if service == "decode":
        options["local-max-tokens"] = 0  # everything goes through a hand-off
    argv = (sys.executable, "-m", "services.cli", service, *(f"--{key}={value}" for key, value in options.items()))
    return ProcessSpec(name, argv, {PARENT_ENV: str(os.getpid())})


def room(args: argparse.Namespace) -> int:
    """Bytes of an arena in which nothing is evicted for the prompt at hand."""
    from twinflow.bench.run import describe
    from twinflow.contracts.workers import Role
    from twinflow.engine.capacity import blocks_for
    from twinflow.engine.config import EngineConfig

    layout = describe(
        EngineConfig(
            args.model,
            "",
            "",
            Role.DECODE,
            dtype=args.dtype,
            state_dtype=args.state_dtype,
            block_tokens=args.block_tokens,
        )
    )
    blocks = PROMPTS_HELD * blocks_for(args.tokens + MORE_TOKENS, layout)
    return (RUNNING + SLOTS) * layout.slot_bytes + (blocks + 1) * layout.block_bytes
