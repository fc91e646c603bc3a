"""Fixtures of the front tests: one decode front, one prefill front, one router."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from services.decode.rpc import DecodeRole
from services.prefill.rpc import PrefillRole
from tests.services.cluster import RouterClient, candidate, decode_front, prefill_front
from tests.services.fake_engine import FakeEngine
from twinflow.engine.front import Front
from twinflow.rpc.v1 import engine_pb2 as pb


@dataclass
class Pair:
    """A router with one decode and one prefill worker; the decode worker holds 4 tokens of any prompt."""

    d: Front
    d_role: DecodeRole
    d_engine: FakeEngine
    p: Front
    p_role: PrefillRole
    p_engine: FakeEngine
    router: RouterClient

    @property
    def prefill(self) -> pb.Candidate:
        return candidate(self.p)

    @property
    def quiet(self) -> bool:
        """Nothing is left of any request, on either side."""
        return not (
            len(self.d_role) or len(self.p_role.offers) or self.d_engine.running or self.p_engine.running
        ) and all(s.open_handoffs == 0 for s in self.d_role.peers.sessions)


@pytest.fixture
async def opened() -> AsyncIterator[contextlib.AsyncExitStack]:
    """Everything a test opens; closed in the opposite order."""
    async with contextlib.AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def pair(opened: contextlib.AsyncExitStack) -> Pair:
    d_engine, p_engine = FakeEngine(hold_tokens=4), FakeEngine(usable=2)
    p, p_role = await opened.enter_async_context(prefill_front(p_engine))
    d, d_role = await opened.enter_async_context(decode_front(d_engine))
    router = RouterClient(d.address)
    opened.push_async_callback(router.close)
    await router.wait("hello")
    return Pair(d, d_role, d_engine, p, p_role, p_engine, router)
