"""Running the `transformers` oracle: one-shot and chunked logits, its caches in our layout, greedy decoding."""

from collections.abc import Sequence

import torch
import transformers

KEEP_OUR_LAYOUT = ("nemotron_h",)  # temporal states are (heads, P, N) in both; of the others the last two axes swap
NEAR_TIE = 1e-4  # two best logits closer than this may swap between correct fp32 implementations


def new_cache(model: transformers.PreTrainedModel) -> transformers.DynamicCache:
    """An empty cache of the model's (text) layers."""
    return transformers.DynamicCache(config=model.config.get_text_config())


@torch.no_grad()
def feed(model: transformers.PreTrainedModel, cache: transformers.DynamicCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits (B, n, vocab) of the next n tokens ids (B, n)."""
    start = cache.get_seq_length()
    positions = torch.arange(start, start + ids.shape[1])[None]
    return model(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits


def one_shot(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> tuple[torch.Tensor, dict[str, list]]:
    """Logits (n, vocab) of a whole sequence and its final states, one per state layer: "temporal" in our layout,
    "conv" (conv_dim, W-1)."""
    cache = new_cache(model)
    logits = feed(model, cache, torch.tensor([list(tokens)]))[0]
    layers = [layer for layer in cache.layers if getattr(layer, "recurrent_states", {}).get(0) is not None]
    temporal = [layer.recurrent_states[0][0] for layer in layers]
    states = {
        "temporal": temporal if model.config.model_type in KEEP_OUR_LAYOUT else [t.transpose(-1, -2) for t in temporal],
        "conv": [layer.conv_states[0][0][:, 1:] for layer in layers],  # the oracle keeps one input more
    }
    return logits, states


def greedy(model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]], new: int) -> torch.Tensor:
    """Greedy continuation of prompts of one length: logits (B, new, vocab) that each new token was taken from."""
    cache = new_cache(model)
    rows = [feed(model, cache, torch.tensor(prompts))[:, -1]]
    for _ in range(new - 1):
        rows.append(feed(model, cache, rows[-1].argmax(-1, keepdim=True))[:, -1])
    return torch.stack(rows, 1)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value."""
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())
