"""The shape of the model: Qwen3.5 text layout at about 8 M parameters.

K != V and Hk != Hv on purpose: a transposed state or a wrong head mapping cannot go unnoticed with these weights.
"""

import json
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tools.train_tiny.tokenizer import END_OF_TEXT, TURN_END

MAX_TOKENS = 4096
REPETITION_PENALTY = 1.15


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5TextConfig:
    eos, pad = (tokenizer.convert_tokens_to_ids(t) for t in (TURN_END, END_OF_TEXT))
    return Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=48,
        linear_conv_kernel_dim=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        # 16 of 64 dimensions rotate, so the three M-RoPE sections share 8 frequencies; for text it is plain RoPE.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def save_model(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes config, generation config and weights (bf16); the tokenizer's files are tokenizer.py's business.

    The config asks for float32: exact for bf16 weights, and CPUs are slow at bf16. Greedy decoding of so small a model
    goes round in circles, so a repetition penalty is part of its defaults.
    """
    eos, pad = (tokenizer.convert_tokens_to_ids(t) for t in (TURN_END, END_OF_TEXT))
    model.generation_config = GenerationConfig(
        eos_token_id=[eos, pad], pad_token_id=pad, do_sample=False, repetition_penalty=REPETITION_PENALTY
    )
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text()) | {"dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
