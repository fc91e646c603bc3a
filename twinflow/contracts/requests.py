"""A generation request as engines see it: token ids in, token ids out. Text lives in the router."""

from dataclasses import dataclass, field
from enum import Enum

from twinflow.contracts.facts import fact


class FinishReason(Enum):
    STOP = "stop"  # EOS or a stop token id
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class GrammarKind(Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # of the whole text
    CHOICE = "choice"  # a JSON list of strings
    GRAMMAR = "grammar"  # Lark or GBNF


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a reply must be. `field`: the request's field that it came from, which errors are blamed on.

    `think_end` is the token that ends the reply's thoughts: the grammar holds after it, and before it nothing does but that the
    reply may not end. `think_start` None = the prompt has opened them; else they are there only if the reply begins with this
    token.
    """

    kind: GrammarKind
    text: str
    lenient: bool = False  # keywords of a JSON schema that cannot be enforced are passed over, not refused
    field: str = "structured_outputs"
    think_end: int | None = None
    think_start: int | None = None


@fact(frozen=True, slots=True)
class SamplingParams:
    """Sampling is f(seed, sample index, position): the same request gives the same tokens wherever it is computed.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0, `min_p` 0.0 mean off. Penalties follow OpenAI (presence,
    frequency over generated tokens) and Hugging Face (repetition over prompt and generated tokens, 1.0 = off).
    `logprobs` None = none, 0 = the sampled token only, n = top n besides.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()  # of the model; not applied when ignore_eos
    ignore_eos: bool = False
    min_tokens: int = 0
    sample_index: int = 0  # which of n samples
    grammar: Grammar | None = None


@fact(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one generated token under the model's raw logits (before temperature, filters and
    grammar)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@fact(frozen=True, slots=True)
class Sample:
    """One generated token; `finish` is set on the last one. The last token is part of the output, EOS included."""

    token_id: int
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`id` is unique per attempt and doubles as the idempotency id. `prompt` is packed uint32 ids.
    `forced` tokens (packed) were already sent to the client by an earlier attempt: they count as generated."""

    id: str
    prompt: bytes
    sampling: SamplingParams
    root: bytes  # root hash of the chain: model, tenant, salt, adapter
    forced: bytes = b""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def max_total_tokens(self) -> int:
        return self.prompt_tokens + self.sampling.max_tokens


@fact(frozen=True, slots=True)
class RequestStats:
    """What happened to one request, reported with its last token; what `usage` and the demo's table show."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens not computed anywhere for this request
    route: str = ""  # "local" | "remote"
    reason: str = ""
    decode_attention_tokens: int = 0
    decode_checkpoints: tuple[int, ...] = ()
    decode_resumed_tokens: int = 0
    prefill_attention_tokens: int = 0
    prefill_checkpoints: tuple[int, ...] = ()
    prefill_resumed_tokens: int = 0
    blocks_moved: int = 0
    slots_moved: int = 0
    bytes_moved: int = 0
    transfer_s: float = 0.0
    transport: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    extra: dict[str, float] = field(default_factory=dict)
    faulty_prefill_workers: tuple[str, ...] = ()  # whose hand-offs of this request failed, back-pressure excepted
