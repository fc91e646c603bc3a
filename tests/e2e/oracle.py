"""`transformers` as the oracle: greedy tokens of a prompt, and how close its two best logits came at each of them."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

TIE = 1e-4  # below this gap of the two best logits either token is right
BLOCK, CHUNK = 64, 512
LENGTHS = (
    1, 2, 3, 31, 62, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 255, 256, 257, 319, 320, 321, 383, 384, 385,
    447, 448, 449, 510, 511, 512, 513, 514, 575, 576, 577, 639, 640, 641, 699, 700,
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """`gaps[i]`: best minus second best logit where `tokens[i]` was chosen."""

    tokens: list[int]
    gaps: list[float]


@dataclass
class Ties:
    """Differences that a near-tie of the oracle explains; printed, and bounded by the caller."""

    compared: int = 0
    found: list[str] = field(default_factory=list)

    def check(self, name: str, got: list[int], want: Answer) -> None:
        """Raises AssertionError unless equal, or first different at a near-tie."""
        self.compared += len(want.tokens)
        if got == want.tokens:
            return
        at = next((i for i, (a, b) in enumerate(zip(got, want.tokens, strict=False)) if a != b), len(got))
        assert len(got) == len(want.tokens), f"{name}: {len(got)} tokens, expected {len(want.tokens)}"
        assert want.gaps[at] < TIE, f"{name}: token {at} is {got[at]}, expected {want.tokens[at]} ({want.gaps[at]:.2e})"
        self.found.append(f"{name}: token {at}, gap {want.gaps[at]:.1e}")


class Oracle:
    def __init__(self, model: str) -> None:
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        text = (Path(__file__).parent.parent / "data" / "passages.txt").read_text()
        self.text_ids: list[int] = self.tokenizer(text)["input_ids"]
        self._known: dict[tuple[int, ...], Answer] = {}

    def prompts(self, count: int) -> list[list[int]]:
        """Real text of lengths around block and chunk boundaries, each starting elsewhere so that none is a prefix."""
        step = max(1, (len(self.text_ids) - max(LENGTHS)) // count)
        return [self.text_ids[i * step : i * step + LENGTHS[i % len(LENGTHS)]] for i in range(count)]

    def greedy(self, prompt: list[int], new_tokens: int) -> Answer:
        """From the prompt alone, in one forward pass, then token by token; EOS does not end it."""
        key = (*prompt, new_tokens)
        if key not in self._known:
            with torch.no_grad():
                out = self.model.generate(
                    torch.tensor([prompt]),
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    repetition_penalty=1.0,  # the bare model: its generation config has one
                    eos_token_id=None,
                    pad_token_id=0,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            best = [row[0].topk(2).values.tolist() for row in out.logits]
            gaps = [a - b if math.isfinite(b) else math.inf for a, b in best]
            self._known[key] = Answer(out.sequences[0, len(prompt) :].tolist(), gaps)
        return self._known[key]
