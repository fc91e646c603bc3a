"""A prefill worker that restarts 200 times at the same address: each time a new session, nothing of the old one stays, and
the session to another worker is never touched."""

import gc
import os
from contextlib import AsyncExitStack

import pytest

from services.decode.join import Handoff
from services.decode.session import Session
from tests.services.cluster import RouterClient, candidate, decode_front, prefill_front, submit, until
from tests.services.fake_engine import FakeEngine
from twinflow.engine import base

RESTARTS = 200
WARM = 20  # until allocators and pools have their size


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(o) is kind for o in gc.get_objects())


@pytest.mark.timeout(240)
async def test_two_hundred_restarts_leave_nothing_behind(opened: AsyncExitStack) -> None:
    d_engine, q_engine = FakeEngine(), FakeEngine()
    d, role = await opened.enter_async_context(decode_front(d_engine))
    q, _ = await opened.enter_async_context(prefill_front(q_engine, worker_id="q0"))
    router = RouterClient(d.address)
    opened.push_async_callback(router.close)
    router.submit(submit("q-first", candidate(q)))
    await router.end_of("q-first")
    (q_session,) = role.peers.sessions
    port, seen, sizes = 0, set(), {}
    for k in range(RESTARTS):
        async with prefill_front(FakeEngine(), worker_id="p0", port=port) as (p, _):
            port = int(p.address.rsplit(":", 1)[1])
            assert p.incarnation not in seen
            seen.add(p.incarnation)
            router.submit(submit(f"r{k}", candidate(p)))
            await until(lambda n=k: router.terminal(f"r{n}"))
            (last,) = router.terminal(f"r{k}")
            assert (last.error.message, last.stats.route) == ("", "remote"), last.stats.reason
        await until(lambda: role.peers.sessions == [q_session])
        router.got.clear()
        if k + 1 in (WARM, RESTARTS):
            await until(lambda: alive(Session) == 1)  # the stream's task ends a moment after its session
            sizes[k + 1] = (descriptors(), alive(Session), alive(Handoff), len(role.peers._links))
    router.submit(submit("q-last", candidate(q)))
    last = await router.end_of("q-last")
    assert (last.error.message, last.stats.route) == ("", "remote")
    assert role.peers.sessions == [q_session] and q_session.live, "the other pair was left alone"
    print(f"\ndescriptors, sessions, hand-offs, links: {sizes}")
    assert sizes[RESTARTS][0] <= sizes[WARM][0] + 2
    assert sizes[RESTARTS][1:] == sizes[WARM][1:]
    gone = [g.key for g in d_engine.sent(base.PeerGone)]
    assert len(gone) == len(set(gone)) == RESTARTS, "the engine forgets each incarnation, once"
    assert {key[1] for key in gone} == seen
