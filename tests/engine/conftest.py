"""One tiny random model and its oracle for all engine tests; a fresh pair of workers for each."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.engine.harness import Pair
from tests.models.tiny import build_reference, make_checkpoint
from twinflow.models.base import HybridModel
from twinflow.models.loader import load_model

Oracle = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> HybridModel:
    torch.set_num_threads(1)
    return load_model(str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3_5", 0)))


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """Greedy tokens of `transformers`, computed from the prompt alone; remembered per prompt."""
    reference = build_reference("qwen3_5", 0)
    known: dict[tuple[int, ...], list[int]] = {}

    def greedy(prompt: list[int], new_tokens: int) -> list[int]:
        key = tuple(prompt)
        if len(known.get(key, [])) < new_tokens:
            with torch.no_grad():
                ids = torch.tensor([prompt])
                out = reference.generate(ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
            known[key] = out[0, len(prompt) :].tolist()
        return known[key][:new_tokens]

    return greedy


@pytest.fixture
def pair(model: HybridModel) -> Iterator[Pair]:
    pair = Pair.build(model)
    yield pair
    pair.close()
