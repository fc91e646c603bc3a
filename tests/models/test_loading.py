"""What can be loaded and how: layouts, dtypes, shards, prefixes, ids, identity."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.reference import one_shot, relative_error
from tests.models.tiny import VOCAB, Runner, build_reference, make_checkpoint, prompt, save
from twinflow.contracts.groups import GroupKind
from twinflow.models import hub
from twinflow.models.base import HybridModel
from twinflow.models.loader import describe_layout, load_model, random_model

TOKENS = prompt(3, 40)


def logits(model: HybridModel) -> torch.Tensor:
    runner = Runner(model, sequences=1, tokens=64)
    seq = runner.add()
    return runner.step({seq: TOKENS})[seq]


def edit(folder: Path, file: str, change: Callable[[dict], object]) -> None:
    values = json.loads((folder / file).read_text())
    change(values)
    (folder / file).write_text(json.dumps(values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "qwen3_5", 0)


def test_layout(folder: Path) -> None:
    model = load_model(str(folder), block_tokens=16)
    attention, state = model.layout.groups
    assert (attention.name, attention.kind, attention.layer_ids) == ("attention", GroupKind.ATTENTION, (3,))
    assert (state.name, state.kind, state.layer_ids) == ("state", GroupKind.STATE, (0, 1, 2))
    assert [(t.name, t.shape, t.dtype) for t in attention.tensors] == [
        ("k", (2, 32), "float32"),
        ("v", (2, 32), "float32"),
    ]
    assert [(t.name, t.shape, t.dtype) for t in state.tensors] == [
        ("temporal", (6, 24, 16), "float32"),
        ("conv", (2 * 2 * 16 + 6 * 24, 3), "float32"),
    ]
    assert model.layout.block_tokens == 16
    assert (model.vocab_size, model.max_model_tokens) == (VOCAB, 2048)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_vlm", "qwen3_next"])
def test_describe_layout_needs_no_weights(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family, 0)
    layout = load_model(str(folder), dtype="bfloat16", block_tokens=32).layout
    config = json.loads((folder / "config.json").read_text())
    described = describe_layout(config, dtype="bfloat16", block_tokens=32, model_id=layout.model_id)
    assert described == layout
    assert described.fingerprint() == layout.fingerprint()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_vlm", "qwen3_next"])
def test_tied_embeddings(tmp_path: Path, family: str) -> None:
    oracle = build_reference(family, 0, tie_word_embeddings=True)
    save(oracle, tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    model = load_model(str(tmp_path / "tied"))
    assert relative_error(logits(model), one_shot(oracle, TOKENS)[0]) < 1e-5


def test_shards(tmp_path: Path, folder: Path) -> None:
    sharded = make_checkpoint(tmp_path / "s", "qwen3_5", 0, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    one, many = load_model(str(folder)), load_model(str(sharded))
    assert logits(one).equal(logits(many))
    assert one.layout.model_id == many.layout.model_id


def test_extra_weights_of_other_heads_are_skipped(folder: Path) -> None:
    before = logits(load_model(str(folder)))
    weights = load_file(folder / "model.safetensors")
    weights |= {"mtp.fc.weight": torch.ones(64, 128), "model.visual.blocks.0.norm1.weight": torch.ones(32)}
    save_file(weights, folder / "model.safetensors")
    assert logits(load_model(str(folder))).equal(before)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_fp32(tmp_path: Path, family: str, dtype: str) -> None:
    folder = make_checkpoint(tmp_path, family, 0)
    model, exact = load_model(str(folder), dtype=dtype), load_model(str(folder))
    assert {t.dtype for t in model.layout.attention.tensors} == {dtype}
    assert [t.dtype for t in model.layout.state.tensors] == ["float32", dtype]
    got = logits(model)
    assert got.dtype == torch.float32
    assert got.isfinite().all()
    agree = (got - logits(exact)).norm() / logits(exact).norm()
    assert agree < {"bfloat16": 0.1, "float16": 0.02}[dtype]


def test_state_dtype(folder: Path) -> None:
    model = load_model(str(folder), state_dtype="bfloat16")
    assert [t.dtype for t in model.layout.state.tensors] == ["bfloat16", "float32"]
    assert relative_error(logits(model), logits(load_model(str(folder)))) < 1e-5  # one chunk: rounded after use only


def test_auto_dtype_is_the_configs_then_the_weights(tmp_path: Path) -> None:
    save(build_reference("qwen3_5", 0).bfloat16(), tmp_path / "m")
    assert load_model(str(tmp_path / "m")).layout.attention.tensors[0].dtype == "bfloat16"
    edit(tmp_path / "m", "config.json", lambda c: c.pop("dtype"))
    assert load_model(str(tmp_path / "m")).layout.attention.tensors[0].dtype == "bfloat16"
    edit(tmp_path / "m", "config.json", lambda c: c.update(torch_dtype="float32"))
    assert load_model(str(tmp_path / "m")).layout.attention.tensors[0].dtype == "float32"


def test_eos_ids(folder: Path) -> None:
    assert load_model(str(folder)).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_model(str(folder)).eos_token_ids == (7, 9)
    (folder / "generation_config.json").unlink()
    edit(folder, "config.json", lambda c: c.update(eos_token_id=[5]))
    assert load_model(str(folder)).eos_token_ids == (5,)
    edit(folder, "config.json", lambda c: c.pop("eos_token_id"))
    assert load_model(str(folder)).eos_token_ids == ()


def test_identity_follows_content_not_place(tmp_path: Path, folder: Path) -> None:
    first = load_model(str(folder)).layout.model_id
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    edit(moved, "config.json", lambda c: c.update(transformers_version="0.0", _name_or_path="x"))
    assert load_model(str(moved)).layout.model_id == first

    edit(moved, "config.json", lambda c: c.update(rms_norm_eps=1e-5))
    assert load_model(str(moved)).layout.model_id != first

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][5] += 1e-3
    save_file(weights, folder / "model.safetensors")
    assert load_model(str(folder)).layout.model_id != first


def test_hub_ids_are_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, allow_patterns: list[str]) -> str:
        asked.append(repo)
        assert "*.safetensors" in allow_patterns
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert logits(load_model("owner/model-1.0")).equal(logits(load_model(str(folder))))
    assert asked == ["owner/model-1.0"]


def test_random_model_runs_without_a_checkpoint(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    model = random_model(config, seed=1)
    assert logits(model).isfinite().all()
    assert logits(model).equal(logits(random_model(config, seed=1)))
    assert model.layout.model_id != random_model(config, seed=2).layout.model_id
