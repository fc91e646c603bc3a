"""A new transfer generation over device memory: registered from the transfer thread, read through at once, the old one gone."""

import queue
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("nixl")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

TOTAL = 64 << 20


def test_reads_go_on_through_a_new_generation() -> None:
    from twinflow.engine.child import _transport
    from twinflow.transfer.base import GenerationClosed, GenerationOpened, PeerArena, PullFinished, ReadRange
    from twinflow.transfer.thread import TransferThread

    source = torch.arange(TOTAL // 8, dtype=torch.int64, device="cuda:0").view(torch.uint8)
    target = torch.zeros(TOTAL, dtype=torch.uint8, device="cuda:0")
    events: queue.Queue[Any] = queue.Queue()

    def open_target(generation: int) -> Any:
        return _transport(f"d/i/{generation}", SimpleNamespace(storage=target))  # type: ignore[arg-type]

    served = _transport("p/i/1", SimpleNamespace(storage=source))  # type: ignore[arg-type]
    server = TransferThread(served, lambda event: None, serve=True)
    server.serving(True)
    reader = TransferThread(open_target(1), events.put, reopen=open_target)
    peer = PeerArena(
        "p", "i", 1, source.data_ptr(), TOTAL, 1 << 20, 1 << 20, 63, 1, "VRAM", 0, "p/i/1", served.agent_metadata
    )
    try:
        reader.connect(peer)
        for generation in (1, 2, 3):
            target.zero_()
            torch.cuda.synchronize()
            reader.pull(f"pull-{generation}", peer.key, [ReadRange(0, 0, TOTAL)])
            event = events.get(timeout=30)
            assert isinstance(event, PullFinished) and event.ok, event
            assert torch.equal(target, source), f"generation {generation} over {event.transport}"
            reader.renew("asked for")
            assert isinstance(events.get(timeout=30), GenerationOpened)
            assert isinstance(events.get(timeout=30), GenerationClosed)
    finally:
        reader.close()
        server.close()
