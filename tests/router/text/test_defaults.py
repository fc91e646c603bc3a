"""A model's own sampling settings stand where a client says nothing, and nowhere else."""

import json
from pathlib import Path

import pytest

from services.router.http.completions import CompletionFields
from services.router.text.defaults import SamplingDefaults, load_sampling_defaults
from twinflow.contracts.errors import ModelError


def write(folder: Path, **values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_openai_defaults_without_a_file(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)


def test_the_models_own(tmp_path: Path) -> None:
    write(tmp_path, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, do_sample=True, eos_token_id=3)
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(0.6, 0.95, 20, 0.0, 1.1)


@pytest.mark.parametrize("value", ["0.5", True, [1]])
def test_no_number_is_refused_by_name(tmp_path: Path, value: object) -> None:
    write(tmp_path, top_p=value)
    with pytest.raises(ModelError, match="top_p="):
        load_sampling_defaults(tmp_path)


def test_what_the_client_says_wins() -> None:
    defaults = SamplingDefaults(0.6, 0.9, 20, 0.1, 1.2)
    silent = CompletionFields(model="m", prompt="p").sampling(None, 1, None, (), 100, defaults)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p, silent.repetition_penalty) == (
        0.6, 0.9, 20, 0.1, 1.2,
    )  # fmt: skip
    said = CompletionFields(model="m", prompt="p", temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1)
    loud = said.sampling(None, 1, None, (), 100, defaults)
    assert (loud.temperature, loud.top_p, loud.top_k, loud.min_p, loud.repetition_penalty) == (0, 1, 0, 0, 1)
