"""A link that is told to end while gRPC ends its call."""

import asyncio

import pytest

from services.router.dispatch.link import WorkerLink


@pytest.mark.parametrize("told_as", ["a failed call", "itself"])
async def test_a_cancellation_ends_it_whatever_grpc_makes_of_it(told_as: str) -> None:
    class Link(WorkerLink):
        def __init__(self) -> None:
            self.dials = 0

        async def _dial(self) -> tuple[str, bool]:
            self.dials += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if told_as == "itself":
                    raise
            return "CANCELLED: Locally cancelled by application!", False

    link = Link()
    task = asyncio.create_task(link.run())
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5)
    task.cancel()
    assert done
    assert task.cancelled()
    assert link.dials == 1
