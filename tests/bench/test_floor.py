"""The floor's bytes and operations: against a count of the checkpoint's tensors, and a known shape's known numbers."""

import json
from pathlib import Path

import pytest
import torch

from tests.models.tiny import make_checkpoint
from twinflow.bench.floor import Footprint
from twinflow.bench.rates import Rates
from twinflow.bench.rows import Row
from twinflow.kernels.select import reference_kernels
from twinflow.models.checkpoint import Checkpoint
from twinflow.models.families import supported_families
from twinflow.models.layers.decoder import Decoder
from twinflow.models.loader import describe_layout, family_of, load_model
from twinflow.models.weights import ShapeWeights

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "qwen3.5-4b.json"


@pytest.mark.parametrize(
    ("family", "tied"),
    [("qwen3_5", True), ("qwen3_5", False), ("nemotron_h", False)],
    ids=["tied", "own head", "mamba"],
)
def test_weights_are_those_of_the_checkpoint(family: str, tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, 0, tie_word_embeddings=tied)
    model = load_model(str(folder))
    assert isinstance(model, Decoder)
    found = Footprint.of(model)
    tensors = Checkpoint.open(folder).tensors
    taken = {n: t for n, t in tensors.items() if not (tied and n == "lm_head.weight")}
    assert found.weights_bytes == sum(4 * torch.Size(t.shape).numel() for t in taken.values())
    assert found.read_bytes == found.weights_bytes - (0 if tied else model.embedding.nbytes)


@pytest.fixture(scope="module")
def four_b() -> Footprint:
    config = json.loads(CONFIG.read_text())
    config["text_config"]["vocab_size"] = 151_936
    layout = describe_layout(config, dtype="bfloat16")
    family = family_of(config, supported_families())
    model = family.build(config, ShapeWeights(torch.bfloat16), layout, (), reference_kernels(), "meta")
    assert isinstance(model, Decoder)
    return Footprint.of(model)


def test_a_known_shape(four_b: Footprint) -> None:
    assert four_b.read_bytes == pytest.approx(7.92e9, rel=2e-3)
    assert four_b.slot_bytes == pytest.approx(51.5e6, rel=2e-3)
    assert four_b.token_bytes == 32_768


@pytest.mark.parametrize(
    ("row", "milliseconds"),
    [
        (Row("prefill", 1, 4096), 39.0),
        (Row("prefill", 1, 16384), 172.0),
        (Row("prefill", 1, 32768), 390.0),
        (Row("prefill", 32, 4096), 1250.0),
        (Row("decode", 1, 1024), 1.87),
        (Row("decode", 64, 1024), 3.91),
        (Row("decode", 256, 1024), 10.1),
        (Row("decode", 32, 8192), 4.6),
    ],
    ids=str,
)
def test_floors_of_a_known_shape(four_b: Footprint, row: Row, milliseconds: float) -> None:
    rates = Rates(copy_bytes_per_s=4.3e12, read_bytes_per_s=4.4e12, operations_per_s=790e12)
    work = four_b.work(row)
    assert 1e3 * rates.least_s(work.moved_bytes, work.operations) == pytest.approx(milliseconds, rel=0.02)


def test_a_longer_context_costs_what_its_keys_and_values_take(four_b: Footprint) -> None:
    row = Row("decode", 4, 1000)
    extra = four_b.work(row, context_tokens=1500.0).moved_bytes - four_b.work(row).moved_bytes
    assert extra == 4 * 500 * four_b.token_bytes
