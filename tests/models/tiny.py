"""Tiny random checkpoints and a small runner: what tests need to drive a model without an engine.

folder = make_checkpoint(tmp_path, "qwen3_5", seed=0)
runner = Runner(load_model(str(folder)))
a = runner.add()
logits = runner.step({a: [1, 2, 3]})[a]         # (3, vocab): logits after each of the tokens
tokens = runner.greedy({a: [7, 8]}, new=5)[a]   # feeds 7, 8 after what `a` holds, then decodes 5 tokens
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from twinflow.cache.arena import Arena, ArenaGeometry
from twinflow.models.base import ForwardBatch, HybridModel

VOCAB = 256

# Dims on purpose non-square (K != V, Hk != Hv, Hkv != H, heads * head_dim != hidden), so that a transposed or mixed-up
# axis cannot go unnoticed.
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Larger than real models use: random networks feed the norms near-zero rows, which eps 1e-6 turns into amplified
# rounding (two ways of running `transformers` itself then differ by 2e-5). It also makes a forgotten eps show.
_EPS = 1e-3
_QWEN: dict[str, Any] = {
    **_SHARED,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rms_norm_eps": _EPS,
}
_NEMOTRON_H: dict[str, Any] = {
    **_SHARED,
    "hybrid_override_pattern": "M-M*-M",
    "mamba_num_heads": 6,
    "mamba_head_dim": 24,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 32,  # of the oracle's own arithmetic; changes no result
    "layer_norm_epsilon": _EPS,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_MROPE: dict[str, Any] = dict(**_ROPE, mrope_section=[2, 1, 1], mrope_interleaved=True)
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}

FAMILIES = ("qwen3_5", "qwen3_5_vlm", "qwen3_next", "nemotron_h")


def build_reference(family: str, seed: int, **overrides: Any) -> transformers.PreTrainedModel:
    """A tiny `transformers` model in fp32 with every parameter randomised; `overrides` change its (text) config.

    Families: "qwen3_5" (separate projections), "qwen3_5_vlm" (the same inside a vision-language model), "qwen3_next"
    (interleaved projections, all layers dense), "nemotron_h" (its steps not clamped, so that they do not depend on how
    a prompt is cut).
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    values = {**(_NEMOTRON_H if family == "nemotron_h" else _QWEN), **overrides}
    if family == "qwen3_5":
        values = {"rope_parameters": _MROPE, **values}
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**values))
    elif family == "qwen3_5_vlm":
        values = {"rope_parameters": _MROPE, **values}
        tied = values["tie_word_embeddings"]
        config = transformers.Qwen3_5Config(text_config=values, vision_config=_VISION, tie_word_embeddings=tied)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    elif family == "qwen3_next":
        values = {"rope_parameters": _ROPE, "num_experts": 0, **values}
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**values))
    elif family == "nemotron_h":
        model = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**values))
        for layer in model.model.layers:
            if layer.block_type == "linear_attention":
                layer.mixer.time_step_limit = (0.0, float("inf"))
    else:
        raise ValueError(f"family {family!r} is none of {FAMILIES}")
    _randomise(model)
    return model.float().eval()


def make_checkpoint(tmp_path: Path, family: str, seed: int, *, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """Saves `build_reference(family, seed, **overrides)` below `tmp_path` as a Hugging Face folder and returns it."""
    folder = tmp_path / f"{family}-{seed}"
    save(build_reference(family, seed, **overrides), folder, max_shard_size=max_shard_size)
    return folder


def save(model: transformers.PreTrainedModel, folder: Path, *, max_shard_size: str = "5GB") -> None:
    """`save_pretrained` without its advice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, max_shard_size=max_shard_size)


def prompt(seed: int, tokens: int) -> list[int]:
    """Random token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (tokens,), generator=generator).tolist()


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    """Fresh models have near-tied logits, and parameters at 0 or 1 hide errors in them; so move every one of them."""
    for name, p in model.named_parameters():
        if name.endswith("dt_bias"):
            p.uniform_(-4, 1)
        elif name.endswith("A_log"):
            p.uniform_(1, 16).log_()
        elif p.ndim == 1:
            p.add_(torch.randn_like(p) * 0.3)
        else:
            p.mul_(4)


@dataclass(slots=True)
class _Held:
    """What the runner holds for a sequence: its slot, its blocks, how many tokens it has been fed."""

    slot: int
    blocks: list[int] = field(default_factory=list)
    fed_tokens: int = 0


class Runner:
    """Feeds sequences to a model over an arena with private block tables; no sharing, no eviction.

    The arena starts out full of NaN and blocks are handed out in a scattered order, so that reading what was never
    written, or the wrong block, shows. Sequences are ints from `add`.
    """

    def __init__(self, model: HybridModel, *, sequences: int = 8, tokens: int = 512, device: str = "cpu") -> None:
        """Room for `sequences` sequences of up to `tokens` tokens each."""
        layout = model.layout
        self.model, self.device = model, device
        self.per_sequence_blocks = -(-tokens // layout.block_tokens)
        blocks = sequences * self.per_sequence_blocks
        budget = sequences * layout.slot_bytes + (blocks + 1) * layout.block_bytes + 512
        self.geometry = ArenaGeometry.split(layout, budget, sequences)
        self.arena = Arena(layout, self.geometry, device)
        self.arena.storage.fill_(0xFF)  # NaN in every float dtype
        order = torch.randperm(self.geometry.blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._free_blocks, self._free_slots = order, list(range(sequences))
        self._sequences: dict[int, _Held] = {}
        self._next = 0

    def add(self) -> int:
        """A new, empty sequence. Raises IndexError when all slots are taken."""
        self._next += 1
        self._sequences[self._next] = _Held(self._free_slots.pop())
        return self._next

    def drop(self, seq: int) -> None:
        """Frees a sequence; its memory is handed out again as it is."""
        gone = self._sequences.pop(seq)
        self._free_slots.append(gone.slot)
        self._free_blocks += gone.blocks

    def step(self, work: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """One forward pass over a mixed batch: the next tokens of each sequence. Logits (n, vocab) after each token."""
        logits = self.forward(work, self.batch(work))
        return dict(zip(work, logits.split([len(tokens) for tokens in work.values()]), strict=True))

    def forward(self, work: Mapping[int, Sequence[int]], batch: ForwardBatch) -> torch.Tensor:
        """The same with a batch made from `batch(work)`; its logits."""
        logits = self.model.forward(batch, self.arena)
        for seq, tokens in work.items():
            self._sequences[seq].fed_tokens += len(tokens)
        return logits

    def batch(self, work: Mapping[int, Sequence[int]]) -> ForwardBatch:
        """The batch that `step` runs; reserves blocks, changes nothing else. Logits are asked for every token."""
        size = self.model.layout.block_tokens
        tables = torch.full((len(work), self.per_sequence_blocks), -1, dtype=torch.int32)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for i, (seq, tokens) in enumerate(work.items()):
            s = self._sequences[seq]
            end = s.fed_tokens + len(tokens)
            while len(s.blocks) * size < end:
                s.blocks.append(self._free_blocks.pop())
            tables[i, : len(s.blocks)] = torch.tensor(s.blocks, dtype=torch.int32)
            ids += tokens
            positions += range(s.fed_tokens, end)
            slots += [s.blocks[p // size] * size + p % size for p in range(s.fed_tokens, end)]
        lens = tuple(len(tokens) for tokens in work.values())
        starts = [self._sequences[seq].fed_tokens for seq in work]
        rows = [self.geometry.slot_row(self._sequences[seq].slot) for seq in work]
        to = self.device
        return ForwardBatch(
            input_ids=torch.tensor(ids, device=to),
            positions=torch.tensor(positions, device=to),
            cu_seqlens=torch.tensor([0, *lens]).cumsum(0).to(to, torch.int32),
            seq_lens=lens,
            context_lens=torch.tensor([s + n for s, n in zip(starts, lens, strict=True)], dtype=torch.int32, device=to),
            block_tables=tables.to(to),
            kv_slots=torch.tensor(slots, device=to),
            state_rows=torch.tensor(rows, device=to),
            fresh=torch.tensor([s == 0 for s in starts], device=to),
            logit_rows=torch.arange(sum(lens), device=to),
        )

    def state(self, seq: int, tensor: str) -> list[torch.Tensor]:
        """Copies of a sequence's states, one per state layer: "temporal" as its kernel keeps it or "conv" (conv_dim, W-1)."""
        row = self.geometry.slot_row(self._sequences[seq].slot)
        return [view[row].clone() for view in self.arena.layers("state", tensor)]

    def greedy(self, prompts: Mapping[int, Sequence[int]], *, new: int) -> dict[int, list[int]]:
        """Feeds each prompt in one step, then decodes `new` tokens for all sequences together, taking the best logit.

        The last token is returned but not fed.
        """
        logits = self.step(prompts)
        best = {seq: int(rows[-1].argmax()) for seq, rows in logits.items()}
        out = {seq: [token] for seq, token in best.items()}
        for _ in range(new - 1):
            best = {seq: int(rows[0].argmax()) for seq, rows in self.step({s: [t] for s, t in best.items()}).items()}
            for seq, token in best.items():
                out[seq].append(token)
        return out
