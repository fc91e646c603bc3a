"""Every refusal names what is wrong and what would be right."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from tests.models.tiny import make_checkpoint
from twinflow.contracts.errors import ModelError, TwinflowError, Unsupported
from twinflow.models import hub
from twinflow.models.loader import describe_layout, load_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_checkpoint(tmp_path_factory.mktemp("config"), "qwen3_next", 0)
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "qwen3_5", 0)


FEATURES = [
    ({"num_experts": 8}, "layer 0 is a mixture of experts"),
    ({"num_experts": 8, "mlp_only_layers": [0, 2, 3]}, "layer 1 is a mixture of experts"),
    ({"num_experts": 8, "decoder_sparse_step": 3}, "layer 2 is a mixture of experts"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"attn_output_gate": False}, "attn_output_gate=False"),
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "type='linear'"),
    ({"layer_types": ["linear_attention"] * 4}, "all layers are 'linear_attention'"),
    ({"layer_types": ["linear_attention", "sliding_attention", "moe", "full_attention"]}, "'sliding_attention'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8'"),
]


@pytest.mark.parametrize(("change", "says"), FEATURES, ids=lambda v: v if isinstance(v, str) else "")
def test_unsupported_features(config: dict[str, Any], change: dict[str, Any], says: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(says)) as caught:
        describe_layout(config | change)
    assert "Qwen3NextForCausalLM" in str(caught.value)
    assert "not supported" in str(caught.value) or "a hybrid model has both" in str(caught.value)


def test_dense_layers_beside_experts_are_fine(config: dict[str, Any]) -> None:
    described = describe_layout(config | {"num_experts": 8, "mlp_only_layers": [0, 1, 2, 3]})
    assert described == describe_layout(config)


CONTRADICTIONS = [
    ({"num_key_value_heads": 3}, "num_attention_heads / num_key_value_heads = 4 / 3"),
    ({"linear_num_key_heads": 4}, "linear_num_value_heads / linear_num_key_heads = 6 / 4"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=4"),
    ({"hidden_size": None}, "config has no 'hidden_size'"),
    ({"vocab_size": "many"}, "vocab_size='many' must be a positive integer"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps='small' must be a number"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 must be at least 2"),
    ({"head_dim": 12}, "rotary dim 3 must be even"),
]


@pytest.mark.parametrize(("change", "says"), CONTRADICTIONS, ids=lambda v: v if isinstance(v, str) else "")
def test_contradictory_configs(config: dict[str, Any], change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=re.escape(says)):
        describe_layout(config | change)


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"state_dtype": "int8"}], ids=str)
def test_unsupported_dtypes(config: dict[str, Any], options: dict[str, str]) -> None:
    with pytest.raises(Unsupported, match="'int8' is not supported"):
        describe_layout(config, **options)


@pytest.mark.parametrize("names", [["LlamaForCausalLM"], []], ids=str)
def test_unsupported_architecture(config: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        describe_layout(config | {"architectures": names})
    assert (names[0] if names else "model_type 'qwen3_next'") in str(caught.value)
    for supported in ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3NextForCausalLM"):
        assert supported in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no/such/folder does not exist"):
        load_model(str(tmp_path / "no/such/folder"))
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load_model(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        load_model(str(tmp_path / "file"))


def test_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=r"owner/name is neither a folder here nor .* no connection"):
        load_model("owner/name")


def test_missing_tensor(folder: Path) -> None:
    rewrite(folder, {"model.layers.1.linear_attn.A_log": None})
    with pytest.raises(ModelError, match=r"'model.layers.1.linear_attn.A_log' of shape \(6,\) is missing"):
        load_model(str(folder))


def test_misshapen_tensor(folder: Path) -> None:
    rewrite(folder, {"model.layers.3.self_attn.q_proj.weight": torch.ones(128, 64)})
    says = r"'model.layers.3.self_attn.q_proj.weight' has shape \(128, 64\), expected \(256, 64\)"
    with pytest.raises(ModelError, match=says):
        load_model(str(folder))


def test_tensor_without_a_place(folder: Path) -> None:
    rewrite(folder, {"model.layers.3.self_attn.q_proj.bias": torch.ones(256)})
    with pytest.raises(
        ModelError, match=r"1 tensors have no place in this model: 'model.layers.3.self_attn.q_proj.bias'"
    ):
        load_model(str(folder))


def test_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds no safetensors weights"):
        load_model(str(folder))


@pytest.mark.parametrize("content", [b"", b"junk junk junk", b"\xff" * 64], ids=["empty", "junk", "huge header"])
def test_broken_weight_file(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="safetensors file"):
        load_model(str(folder))


def test_truncated_weight_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is truncated"):
        load_model(str(folder))


def test_missing_shard(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5", 0, max_shard_size="100KB")
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-.* is missing, though model.safetensors.index.json names it"):
        load_model(str(folder))


@pytest.mark.parametrize("target", ["../other.safetensors", "/etc/passwd"])
def test_index_pointing_out_of_the_folder(folder: Path, target: str) -> None:
    index = {"weight_map": {"model.norm.weight": target}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside the folder"):
        load_model(str(folder))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_broken_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(TwinflowError, match=r"config\.json"):
        load_model(str(folder))


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replaces, adds or (None) removes tensors of a single-file checkpoint."""
    weights = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del weights[name]
        else:
            weights[name] = value
    save_file(weights, folder / "model.safetensors")
