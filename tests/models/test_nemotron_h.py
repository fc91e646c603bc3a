"""What is particular to Nemotron-H: both spellings of its layers, both names of its tensors, groups, biases, refusals."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.reference import one_shot, relative_error
from tests.models.tiny import VOCAB, Runner, build_reference, prompt, save
from twinflow.contracts.errors import ModelError, Unsupported
from twinflow.contracts.groups import GroupKind
from twinflow.models.base import HybridModel
from twinflow.models.loader import describe_layout, load_model, random_model

TOKENS = prompt(3, 90)
LAYERS = ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "linear_attention"]


def run(model: HybridModel, cuts: tuple[int, ...] = (90,)) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    runner = Runner(model, sequences=1, tokens=128)
    seq, at, rows = runner.add(), 0, []
    for n in cuts:
        rows.append(runner.step({seq: TOKENS[at : at + n]})[seq])
        at += n
    return torch.cat(rows), {name: runner.state(seq, name) for name in ("temporal", "conv")}


def logits(model: HybridModel) -> torch.Tensor:
    return run(model)[0]


@pytest.fixture(scope="module")
def oracle() -> Any:
    return build_reference("nemotron_h", 0)


@pytest.fixture(scope="module")
def expected(oracle: Any) -> torch.Tensor:
    return one_shot(oracle, TOKENS)[0]


@pytest.fixture
def folder(tmp_path: Path, oracle: Any) -> Path:
    save(oracle, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def reconfigure(folder: Path, **changes: Any) -> None:
    """Changes keys of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def rewrite(folder: Path, change: Any) -> None:
    """`change(tensors)` on a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def test_layout(folder: Path) -> None:
    model = load_model(str(folder), dtype="bfloat16", block_tokens=16)
    attention, state = model.layout.groups
    assert (attention.name, attention.kind, attention.layer_ids) == ("attention", GroupKind.ATTENTION, (3,))
    assert (state.name, state.kind, state.layer_ids) == ("state", GroupKind.STATE, (0, 2, 5))
    assert [(t.name, t.shape, t.dtype) for t in attention.tensors] == [
        ("k", (2, 32), "bfloat16"),
        ("v", (2, 32), "bfloat16"),
    ]
    assert [(t.name, t.shape, t.dtype) for t in state.tensors] == [
        ("temporal", (6, 24, 16), "float32"),
        ("conv", (6 * 24 + 2 * 2 * 16, 3), "bfloat16"),
    ]
    assert (model.layout.block_tokens, model.vocab_size, model.max_model_tokens) == (16, VOCAB, 2048)
    assert model.eos_token_ids == (2,)


def test_describe_layout_needs_no_weights(folder: Path, config: dict[str, Any]) -> None:
    layout = load_model(str(folder)).layout
    assert describe_layout(config, model_id=layout.model_id) == layout


OLDER_KEYS = {"mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_conv_bias": True, "attention_head_dim": 32}
SPELLINGS = {
    "pattern": {"layers_block_type": None, "hybrid_override_pattern": "M-M*-M"},
    "older names": {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"]},
    "layer_types": {"layers_block_type": None, "layer_types": LAYERS},
    "both": {"hybrid_override_pattern": "M-M*-M", "num_hidden_layers": 6},
    "older keys": {"n_groups": None, "conv_kernel": None, "use_conv_bias": None, "head_dim": None, **OLDER_KEYS},
    "infinity as a number": {"time_step_limit": [0.0, float("inf")]},
    "no step limit": {"time_step_limit": None},
}


@pytest.mark.parametrize("changes", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings_of_a_config_are_one_model(
    folder: Path, expected: torch.Tensor, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert config["layers_block_type"] == LAYERS  # what `transformers` writes
    before = load_model(str(folder)).layout
    reconfigure(folder, **changes)
    model = load_model(str(folder))
    assert model.layout == before
    assert relative_error(logits(model), expected) < 1e-5


@pytest.mark.parametrize("prefix", ["backbone.", "model."])
def test_names_of_tensors(folder: Path, expected: torch.Tensor, prefix: str) -> None:
    rewrite(folder, lambda tensors: {n.replace("backbone.", prefix): t for n, t in tensors.items()})
    assert relative_error(logits(load_model(str(folder))), expected) < 1e-5


def test_prediction_heads_are_skipped(folder: Path, expected: torch.Tensor) -> None:
    rewrite(folder, lambda tensors: tensors | {"mtp.layers.0.mixer.q_proj.weight": torch.ones(8, 8)})
    assert relative_error(logits(load_model(str(folder))), expected) < 1e-5


def test_tied_embeddings(folder: Path, oracle: Any, expected: torch.Tensor) -> None:
    """Without a stored head the embedding is the head; a stored one counts, as it does in `transformers`."""
    reconfigure(folder, tie_word_embeddings=True)
    assert relative_error(logits(load_model(str(folder))), expected) < 1e-5
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})
    model = load_model(str(folder))
    assert model.head is model.embedding
    with torch.no_grad():
        want = oracle.model(torch.tensor([TOKENS])).last_hidden_state[0] @ oracle.model.embeddings.weight.t()
    assert relative_error(logits(model), want) < 1e-5
    reconfigure(folder, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"'lm_head.weight' of shape \(256, 64\) is missing"):
        load_model(str(folder))


VARIANTS = {
    "one group": {"n_groups": 1},
    "a group per head": {"n_groups": 6},
    "no conv bias": {"use_conv_bias": False},
    "wider conv": {"conv_kernel": 7},
    "no MLP": {"hybrid_override_pattern": "MM*M"},
    "attention first": {"hybrid_override_pattern": "*M-*M"},
    "head_dim and state_dim 8": {"head_dim": 8, "ssm_state_size": 8},
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_variants(tmp_path: Path, overrides: dict[str, Any]) -> None:
    oracle = build_reference("nemotron_h", 3, **overrides)
    save(oracle, tmp_path / "model")
    model = load_model(str(tmp_path / "model"))
    expected, states = one_shot(oracle, TOKENS)
    for cuts in ((90,), (64, 1, 24, 1)):
        got, ours = run(model, cuts)
        assert relative_error(got, expected) < 1e-5
        for name, theirs in states.items():
            for a, b in zip(ours[name], theirs, strict=True):
                assert relative_error(a, b) < 1e-5, name


def test_small_steps_do_not_depend_on_how_a_prompt_is_cut(tmp_path: Path) -> None:
    """Steps near 1e-4, which `transformers` raises to 0.001 by default, and only in chunks."""
    oracle = build_reference("nemotron_h", 0)
    with torch.no_grad():
        for name, p in oracle.named_parameters():
            if name.endswith("dt_bias"):
                p.fill_(-9.0)
    save(oracle, tmp_path / "model")
    model = load_model(str(tmp_path / "model"))
    expected, states = one_shot(oracle, TOKENS)
    for cuts in ((90,), (1,) * 90, (45, *[1] * 45)):
        got, ours = run(model, cuts)
        assert relative_error(got, expected) < 1e-5
        for a, b in zip(ours["temporal"], states["temporal"], strict=True):
            assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_fp32(folder: Path, dtype: str) -> None:
    model = load_model(str(folder), dtype=dtype)
    exact = logits(load_model(str(folder)))
    got = logits(model)
    assert got.dtype == torch.float32
    assert got.isfinite().all()
    assert (got - exact).norm() / exact.norm() < {"bfloat16": 0.1, "float16": 0.02}[dtype]
    layer = model.blocks[0].mixer
    assert {t.dtype for t in (layer.a_log, layer.dt_bias, layer.skip)} == {torch.float32}


def test_random_model_runs_without_a_checkpoint(config: dict[str, Any]) -> None:
    model = random_model(config, seed=1)
    assert logits(model).isfinite().all()
    assert model.layout.model_id != random_model(config | {"layer_norm_epsilon": 1e-6}, seed=1).layout.model_id


def without(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A pattern replaces the list that `transformers` wrote."""
    return {k: v for k, v in config.items() if k != "layers_block_type" or "layers_block_type" in change} | change


FEATURES = [
    ({"hybrid_override_pattern": "M-M*-ME"}, "layer 6 is a mixture of experts"),
    ({"layers_block_type": ["linear_attention", "moe", "full_attention"]}, "layer 1 is a mixture of experts"),
    ({"hybrid_override_pattern": "M-X*"}, "layer 2 is of type 'X'"),
    ({"layers_block_type": ["mamba", "sliding_attention"]}, "layer 1 is of type 'sliding_attention'"),
    ({"hybrid_override_pattern": "M-M-"}, "no layer is 'full_attention' ('*')"),
    ({"hybrid_override_pattern": "*-*-"}, "no layer is 'linear_attention' ('M')"),
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
    ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"use_bias": True}, "use_bias=True"),
    ({"residual_in_fp32": True}, "residual_in_fp32=True"),
    ({"sliding_window": 4096}, "sliding_window=4096"),
    ({"time_step_limit": [0.001, float("inf")]}, "time_step_limit=[0.001, inf]"),
    ({"time_step_limit": [0.0, 0.1]}, "time_step_limit=[0.0, 0.1]"),
    ({"time_step_limit": 1.0}, "time_step_limit=1.0"),
    ({"quantization_config": {"quant_method": "modelopt"}}, "quant_method 'modelopt'"),
]


@pytest.mark.parametrize(("change", "says"), FEATURES, ids=lambda v: v if isinstance(v, str) else "")
def test_unsupported_features(config: dict[str, Any], change: dict[str, Any], says: str) -> None:
    pattern = "hybrid_override_pattern" in change
    with pytest.raises(Unsupported, match=re.escape(says)) as caught:
        describe_layout(without(config, change) if pattern else config | change)
    assert "NemotronHForCausalLM" in str(caught.value)
    assert "not supported" in str(caught.value) or "a hybrid model has both" in str(caught.value)


CONTRADICTIONS = [
    ({"hybrid_override_pattern": "M-M*-"}, "layers_block_type and hybrid_override_pattern describe different layers"),
    ({"num_hidden_layers": 4}, "layers_block_type has 6 entries for num_hidden_layers=4"),
    ({"layers_block_type": None}, "config has neither 'layers_block_type' nor 'hybrid_override_pattern'"),
    ({"num_key_value_heads": 3}, "num_attention_heads / num_key_value_heads = 4 / 3"),
    ({"n_groups": 4}, "mamba_num_heads / n_groups = 6 / 4"),
    ({"conv_kernel": 1}, "conv_kernel=1 must be at least 2"),
    ({"ssm_state_size": None}, "config has no 'ssm_state_size'"),
    ({"intermediate_size": None}, "config has no 'intermediate_size'"),
    ({"mamba_num_heads": "6"}, "mamba_num_heads='6' must be a positive integer"),
]


@pytest.mark.parametrize(("change", "says"), CONTRADICTIONS, ids=lambda v: v if isinstance(v, str) else "")
def test_contradictory_configs(config: dict[str, Any], change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=re.escape(says)):
        describe_layout(config | change)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("backbone.layers.0.mixer.D", None, r"'backbone.layers.0.mixer.D' of shape \(6,\) is missing"),
        ("backbone.layers.0.mixer.norm.weight", (72,), r"has shape \(72,\), expected \(144,\)"),
        ("backbone.layers.0.mixer.in_proj.bias", (358,), "1 tensors have no place in this model"),
        ("backbone.layers.3.mixer.q_norm.weight", (32,), "1 tensors have no place in this model"),
    ],
)
def test_tensors_that_do_not_fit(folder: Path, name: str, shape: tuple[int, ...] | None, says: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {n: t for n, t in tensors.items() if n != name}
        return kept if shape is None else kept | {name: torch.ones(shape)}

    rewrite(folder, change)
    with pytest.raises(ModelError, match=says):
        load_model(str(folder))
