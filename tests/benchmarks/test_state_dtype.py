"""The stepper that the comparison of state dtypes stands on, and what the comparison says of a dtype against itself."""

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.state_dtype import Result, Stepper, read_text, reply
from tests.models.tiny import VOCAB, make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3_5", 0))


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(3, VOCAB, (3, 70), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def test_one_token_at_a_time_equals_all_at_once(folder: str, text: torch.Tensor) -> None:
    whole, single = (Stepper(folder, "float32", 3, 70, "cpu") for _ in range(2))
    for at in range(70):
        last = single.feed(text[:, at : at + 1])
    torch.testing.assert_close(last, whole.feed(text), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_dtype_agrees_with_itself_and_a_narrower_one_nearly(folder: str, text: torch.Tensor) -> None:
    args = argparse.Namespace(model=folder, device="cpu", new_tokens=5)
    results = [Result(dtype) for dtype in ("float32", "float32", "bfloat16")]
    read_text(args, text, results)
    reply(args, text[:, :20], results)
    base, same, narrow = results
    assert (same.nats, same.same_next, same.divergence, same.same_replies) == (base.nats, 1.0, 0.0, 1.0)
    assert same.parted_at is None
    assert narrow.nats != base.nats and narrow.nats == pytest.approx(base.nats, rel=0.02)
    assert 0 < narrow.divergence < 0.05


def test_windows_need_enough_text(folder: str, tmp_path: Path) -> None:
    """A corpus without held-out books is refused with the numbers."""
    from benchmarks import state_dtype

    class Reader:
        ids = (1, 2, 3)

    class Fake:
        @staticmethod
        def from_file(path: str) -> "Fake":
            return Fake()

        def encode(self, text: str) -> Reader:
            return Reader()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_dtype, "Tokenizer", Fake)
        patch.setattr(state_dtype, "read_books", lambda corpus: [])
        with pytest.raises(SystemExit, match="3 tokens, 2 windows of 10 need more"):
            state_dtype.windows(tmp_path, folder, 2, 10)
