"""Whoever keeps dialling, told to end while gRPC ends its call."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.router.dispatch.link import WorkerLink
from twinflow.node.registry.direct import DirectRegistration

Wait = Callable[[], Awaitable[None]]


class Link(WorkerLink):
    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    async def _dial(self) -> tuple[str, bool]:
        await self._wait()
        return "CANCELLED: Locally cancelled by application!", False


class Registration(DirectRegistration):
    def __init__(self, wait: Wait) -> None:
        def no_record() -> None:
            raise AssertionError("never dialled")

        super().__init__("router:1", no_record)  # type: ignore[arg-type]
        self._wait = wait

    async def _session(self, address: str) -> str:
        await self._wait()
        return "CANCELLED: Locally cancelled by application!"


@pytest.mark.parametrize("told_as", ["a failed call", "itself"])
@pytest.mark.parametrize("dialler", [Link, Registration])
async def test_a_cancellation_ends_it_whatever_grpc_makes_of_it(
    told_as: str, dialler: type[Link] | type[Registration]
) -> None:
    dials = 0

    async def wait() -> None:
        nonlocal dials
        dials += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if told_as == "itself":
                raise

    task = asyncio.create_task(dialler(wait).run())
    while not dials:
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5)
    task.cancel()
    assert done
    assert task.cancelled()
    assert dials == 1
