"""Steps that are rehearsed: which, and that they leave nothing behind."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.harness import Worker
from tests.models.tiny import make_checkpoint
from twinflow.engine.rehearsal import doubled, rehearsals
from twinflow.models.loader import load_model
from twinflow.transfer.loopback import LoopbackNetwork


@given(rows=st.integers(1, 300), step=st.integers(1, 20000), chunk=st.integers(1, 5000), captured=st.booleans())
def test_every_size_up_to_the_largest(rows: int, step: int, chunk: int, captured: bool) -> None:
    steps = rehearsals(rows, step, chunk, decode_captured=captured)
    longer = [s for s in steps if max(s.lens) > 1]
    assert all(len(s.lens) <= rows and sum(s.lens) <= step for s in longer), "no step of this worker is larger"
    for kept in (False, True):
        some = [s for s in longer if s.snapshots is kept]
        assert [len(s.lens) for s in some if len(s.lens) == 1] == [1] * len(list(doubled(2, min(chunk, step))))
        assert {len(s.lens) for s in some} - {1} == set(doubled(2, min(rows, step // 2)))
        if min(chunk, step) > 1:
            assert max(sum(s.lens) for s in some if len(s.lens) == 1) == min(chunk, step)
    ones = [s for s in steps if max(s.lens) == 1]
    assert [len(s.lens) for s in ones if not s.shared] == ([] if captured else list(doubled(1, rows)))


def test_sizes_are_doubled() -> None:
    assert list(doubled(2, 20)) == [2, 4, 8, 16, 20]
    assert list(doubled(2, 16)) == [2, 4, 8, 16]
    assert list(doubled(1, 1)) == [1]
    assert list(doubled(2, 1)) == []


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_nothing_is_written(tmp_path: Path, family: str) -> None:
    """Not one byte of any block or slot."""
    model = load_model(str(make_checkpoint(tmp_path, family, 0)))
    worker = Worker(model, "w", LoopbackNetwork(), step_tokens=128, chunk_tokens=64, cuda_graphs="off")
    memory = worker.arena.storage
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    before = memory.clone()
    worker.engine.runner.prepare(worker.engine.config)
    assert torch.equal(memory, before)
    worker.close()
