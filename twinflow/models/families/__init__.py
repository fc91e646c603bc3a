"""Model families; `supported_families` is the one list of what can be loaded, `sized_families` of what can be sized."""

from twinflow.models.families.base import Family
from twinflow.models.families.nemotron_h import NemotronHFamily
from twinflow.models.families.qwen import QwenFamily
from twinflow.models.families.qwen_weights import interleaved_delta, separate_delta


def supported_families() -> dict[str, Family]:
    """Architecture name, as in config.json's `architectures`, to its family."""
    qwen35 = QwenFamily(separate_delta)
    return {
        "NemotronHForCausalLM": NemotronHFamily(),
        "Qwen3_5ForCausalLM": qwen35,
        "Qwen3_5ForConditionalGeneration": qwen35,
        "Qwen3NextForCausalLM": QwenFamily(interleaved_delta),
    }


def sized_families() -> dict[str, Family]:
    """Architectures whose memory can be told from a config: the supported ones, also where layers are mixtures of experts,
    which nothing loads yet."""
    qwen35 = QwenFamily(separate_delta, experts=True)
    return supported_families() | {
        "NemotronHForCausalLM": NemotronHFamily(experts=True),
        "Qwen3_5MoeForCausalLM": qwen35,
        "Qwen3_5MoeForConditionalGeneration": qwen35,
        "Qwen3NextForCausalLM": QwenFamily(interleaved_delta, experts=True),
    }
