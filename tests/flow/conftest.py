"""All three services in one process: the real router, fronts, gRPC and HTTP; engines as threads, loopback as transport.

Nothing is faked but the wire of the transfer, and everything can be looked into afterwards.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from services.decode.config import DecodeConfig
from services.decode.rpc import DecodeRole
from services.prefill.config import PrefillConfig
from services.prefill.rpc import PrefillRole
from services.router.config import RouterConfig
from services.router.main import Router
from tests.models.tiny import build_reference, make_checkpoint
from tests.router.conftest import write_model
from twinflow.cache.arena import Arena
from twinflow.contracts.workers import Role
from twinflow.engine.config import EngineConfig
from twinflow.engine.core import Engine
from twinflow.engine.front import Front, open_front
from twinflow.engine.thread import ThreadEngine
from twinflow.transfer.base import Transport
from twinflow.transfer.loopback import AtPoll, LoopbackNetwork, LoopbackTransport, Scheduler

VOCAB = 384
WAIT_S = 20.0


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = make_checkpoint(tmp_path_factory.mktemp("flow"), "qwen3_5", 0, vocab_size=VOCAB)
    return write_model(folder, eos_token="<|im_end|>")


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> Callable[[list[int], int], list[int]]:
    reference = build_reference("qwen3_5", 0, vocab_size=VOCAB)

    @functools.cache
    def answer(prompt: tuple[int, ...], new_tokens: int) -> list[int]:
        with torch.no_grad():
            out = reference.generate(
                torch.tensor([list(prompt)]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
            )
        return out[0, len(prompt) :].tolist()

    def greedy(prompt: list[int], new_tokens: int) -> list[int]:
        return list(answer(tuple(prompt), new_tokens))

    return greedy


@dataclass
class Flow:
    """A running cluster. `engines` by worker name, `prefill` the prefill role (its leases), `decode` the decode role."""

    router: Router
    engines: dict[str, Engine] = field(default_factory=dict)
    prefill: PrefillRole | None = None
    decode: DecodeRole | None = None
    decoders: dict[str, DecodeRole] = field(default_factory=dict)
    fronts: dict[str, Front] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.router.http_address}"

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for it; AssertionError after WAIT_S."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"never happened: {what}") from None

    async def clean(self) -> None:
        """Every worker ends with nothing held, doomed, pinned or leased, and its integrity intact."""
        for name, engine in self.engines.items():
            await self.until(lambda e=engine: not e.sequences, f"{name} has no sequences")
            await self.until(lambda e=engine: quiet(e), f"{name} is quiet, has {engine.cache.counts()}")
            engine.cache.check_integrity()
        assert self.prefill is not None
        leases = self.prefill.offers.leases
        await self.until(lambda: len(leases) == 0, "no lease is left")


def quiet(engine: Engine) -> bool:
    return all(c.held == c.doomed == c.pinned_by_io == 0 for c in engine.cache.counts().values())


@contextlib.asynccontextmanager
async def run_flow(
    checkpoint: Path,
    scheduler: Scheduler | None = None,
    *,
    local_max_tokens: int = 0,
    more_decode: tuple[str, ...] = (),
    policy: str = "cost",
    **engine: object,
) -> AsyncIterator[Flow]:
    """`local_max_tokens` of the router and the decode workers: by default everything goes through a hand-off. `more_decode`:
    names of further decode workers. `policy`: of the router."""
    network = LoopbackNetwork()
    router = Router(
        RouterConfig(
            model=str(checkpoint),
            served_model="toy",
            http_port=0,
            grpc_port=0,
            local_max_tokens=local_max_tokens,
            policy=policy,
        )
    )
    await router.start()
    flow = Flow(router)

    def settings(name: str, role: Role) -> EngineConfig:
        values = {"max_running": 8, "checkpoint_slots": 8, "cache_bytes": 4 << 20, "dtype": "float32", **engine}
        return EngineConfig(model=str(checkpoint), worker_id=name, incarnation="", role=role, **values)  # type: ignore[arg-type]

    def thread(copies: Scheduler) -> ThreadEngine:
        def transport(agent: str, arena: Arena) -> Transport:
            return LoopbackTransport(network, agent, arena.storage, copies)

        return ThreadEngine(transport)

    common = {"router": (router.grpc_address,), "served_model": "toy"}
    p_engine, d_engine = thread(AtPoll()), thread(scheduler or AtPoll())
    p_config = PrefillConfig(engine=settings("p", Role.PREFILL), **common)
    d_engine_of = {name: thread(scheduler or AtPoll()) for name in more_decode}

    def d_config_of(name: str) -> DecodeConfig:
        return DecodeConfig(engine=settings(name, Role.DECODE), local_max_tokens=local_max_tokens, **common)

    def prefill_role(front):
        flow.prefill = PrefillRole(front, p_config.max_open)
        return flow.prefill

    def decode_role(front):
        role = DecodeRole(front, front.config)
        flow.decode = role if front.worker_id == "d" else flow.decode
        flow.decoders[front.worker_id] = role
        return role

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(router.stop)
        flow.fronts["p"] = await stack.enter_async_context(open_front(p_config, p_engine, prefill_role))
        flow.fronts["d"] = await stack.enter_async_context(open_front(d_config_of("d"), d_engine, decode_role))
        flow.engines = {"p": p_engine.engine, "d": d_engine.engine}
        for name, engine_of in d_engine_of.items():
            flow.fronts[name] = await stack.enter_async_context(open_front(d_config_of(name), engine_of, decode_role))
            flow.engines[name] = engine_of.engine
        counts, decoders = router.view.counts, 1 + len(more_decode)
        await flow.until(lambda: counts()["prefill"] == 1 and counts()["decode"] == decoders, "workers are connected")
        yield flow
