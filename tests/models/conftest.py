"""Checkpoints shared by the model tests, and quiet single-threaded torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from tests.models.tiny import build_reference, save
from twinflow.models.base import HybridModel
from twinflow.models.loader import load_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Pair:
    """The oracle, its checkpoint and what we load from it."""

    oracle: transformers.PreTrainedModel
    folder: Path
    model: HybridModel


CASES = [
    ("qwen3_5", 0),
    ("qwen3_5", 1),
    ("qwen3_next", 0),
    ("qwen3_next", 1),
    ("qwen3_5_vlm", 0),
    ("nemotron_h", 0),
    ("nemotron_h", 1),
]


@pytest.fixture(scope="session", params=CASES, ids=lambda c: f"{c[0]}-seed{c[1]}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, seed = request.param
    oracle, folder = build_reference(family, seed), tmp_path_factory.mktemp(family) / "model"
    save(oracle, folder)
    return Pair(oracle, folder, load_model(str(folder)))
