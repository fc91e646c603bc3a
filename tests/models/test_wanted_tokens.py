"""A pass that wants the logits of a few tokens: the same logits, and the cache is written for all tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.models.reference import relative_error
from tests.models.tiny import Runner, build_reference, prompt, save
from twinflow.models.base import HybridModel
from twinflow.models.layers.decoder import Decoder
from twinflow.models.loader import load_model

# What the last layer with a cache is, and what follows it.
LAST: dict[str, tuple[str, dict[str, Any]]] = {
    "attention, MLP": ("qwen3_5", {}),
    "delta, MLP": ("qwen3_next", {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    "mamba": ("nemotron_h", {}),
    "attention": ("nemotron_h", {"hybrid_override_pattern": "M-M*"}),
}


@pytest.fixture(scope="module", params=LAST)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HybridModel:
    family, overrides = LAST[request.param]
    if "layer_types" in overrides:
        overrides = {**overrides, "num_hidden_layers": len(overrides["layer_types"])}
    folder = tmp_path_factory.mktemp("model") / "model"
    save(build_reference(family, 0, **overrides), folder)
    return load_model(str(folder))


# After each step of a mixed batch, the tokens wanted: of a prompt's end, of decoding beside it, amid a prompt, none.
STEPS = [((70, 33, 1), (69, 103)), ((40, 1, 1), (39, 40, 41)), ((64, 20, 1), (5, 70, 83)), ((30, 1, 1), ())]


def test_logits_and_cache_are_the_same(model: HybridModel) -> None:
    whole, few = Runner(model), Runner(model)
    seqs = [(whole.add(), few.add())[0] for _ in range(3)]
    for number, (lens, wanted) in enumerate(STEPS):
        work = {seq: prompt(10 * number + seq, n) for seq, n in zip(seqs, lens, strict=True)}
        every = torch.cat(list(whole.step(work).values()))
        logits = few.forward(work, replace(few.batch(work), logit_rows=torch.tensor(wanted, dtype=torch.int64)))
        assert logits.shape == (len(wanted), model.vocab_size)
        if wanted:
            assert relative_error(logits, every[list(wanted)]) < 1e-5
    for group, tensor in (("attention", "k"), ("attention", "v"), ("state", "temporal"), ("state", "conv")):
        for mine, theirs in zip(few.arena.layers(group, tensor), whole.arena.layers(group, tensor), strict=True):
            assert mine.isnan().equal(theirs.isnan())  # what was never written
            assert relative_error(mine.nan_to_num(), theirs.nan_to_num()) < 1e-5


def test_only_wanted_tokens_come_out_of_the_last_block(model: HybridModel) -> None:
    came: list[int] = []
    assert isinstance(model, Decoder)
    last = model.blocks[-1]

    def counted(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, added = last.mixer(*args)
        came.append(len(x))
        return x, added

    counted.writes_cache = last.mixer.writes_cache  # type: ignore[attr-defined]
    runner = Runner(replace(model, blocks=(*model.blocks[:-1], replace(last, mixer=counted))))
    work = {runner.add(): prompt(0, 90)}
    runner.forward(work, replace(runner.batch(work), logit_rows=torch.tensor([89])))
    assert came == [1]
