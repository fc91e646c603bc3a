"""The fields that both generation endpoints share, and those that are known but not supported.

Null means "not given", as in OpenAI's API. Everything unknown is refused by name, so that nothing is silently ignored.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from services.router.admission.keys import MAX_PRIORITY
from services.router.text.defaults import SamplingDefaults
from twinflow.contracts.errors import BadRequest, Unsupported
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.requests import SamplingParams

MAX_STOPS = 4
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1

Tokens = Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)]

# Fields of OpenAI's API that change nothing at these values; any other value is refused by name.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "store": (False,),
    "suffix": ("",),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "metadata": ({},),
}
UNSUPPORTED = frozenset(
    {
        *NEUTRAL,
        *("audio", "function_call", "functions", "prediction", "reasoning_effort", "verbosity", "web_search_options"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "use_beam_search"),
        *("adapter", "images", "input_audio", "lora_name", "lora_path", "lora_request", "mm_processor_kwargs"),
        *("prompt_cache_key", "safety_identifier", "length_penalty", "prompt_logprobs", "lora"),
    }
)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class GenerationFields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED

    model: StrictStr
    n: Annotated[StrictInt, Field(ge=1)] = 1
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None  # -1 = off, as elsewhere
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Any = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] = Field(default_factory=list)
    ignore_eos: StrictBool = False
    cache_salt: Annotated[str, Field(max_length=1024)] = ""
    user: StrictStr | None = None
    priority: Annotated[StrictInt, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0

    def reply_limit(self) -> int | None:
        return self.max_tokens

    def stop_strings(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if stops is None:
            return ()
        if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
            raise BadRequest("stop: expected a string or a list of strings", param="stop")
        if len(stops) > MAX_STOPS:
            raise BadRequest(f"stop: at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
        if not all(stops):
            raise BadRequest("stop: an empty string cannot be a stop", param="stop")
        return tuple(stops)

    def sampling(
        self,
        limit: int | None,
        seed: int,
        logprobs: int | None,
        eos_token_ids: tuple[int, ...],
        vocab: int,
        defaults: SamplingDefaults,
    ) -> SamplingParams:
        """`limit` is `reply_limit`; `seed` and the model's `defaults` stand where the client gave nothing. Raises BadRequest for
        ids outside the vocabulary."""
        if limit is not None and self.min_tokens > limit:
            raise BadRequest(f"min_tokens {self.min_tokens} is over max_tokens {limit}", param="min_tokens")
        for id in self.stop_token_ids:
            _in_vocabulary(id, vocab, "stop_token_ids")
        return SamplingParams(
            max_tokens=limit or 1,
            seed=(seed if self.seed is None else self.seed) % 2**64,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_k=max(0, defaults.top_k if self.top_k is None else self.top_k),
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=(
                defaults.repetition_penalty if self.repetition_penalty is None else self.repetition_penalty
            ),
            logit_bias=self._bias(vocab) if self.logit_bias else (),
            logprobs=logprobs,
            stop_token_ids=tuple(self.stop_token_ids),
            eos_token_ids=eos_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
        )

    def _bias(self, vocab: int) -> tuple[tuple[int, float], ...]:
        bias = []
        for key, value in self.logit_bias.items():
            if not key.isdecimal() or not key.isascii():
                raise BadRequest(f"logit_bias: {key!r} is not a token id", param="logit_bias")
            bias.append((_in_vocabulary(int(key[:12]), vocab, "logit_bias"), value))
        return tuple(bias)


def _in_vocabulary(id: int, vocab: int, param: str) -> int:
    if not 0 <= id < vocab:
        raise BadRequest(f"{param}: token id {id} is outside the vocabulary of {vocab}", param=param)
    return id


class Ids(NamedTuple):
    """A prompt of token ids, `most` is the largest. `packed` is empty where one of them is no uint32."""

    tokens: Sequence[int]
    packed: bytes
    most: int

    def known(self, vocab: int, where: str, param: str) -> bytes:
        """Packed. Raises BadRequest for ids outside the vocabulary."""
        if self.packed and self.most < vocab:
            return self.packed
        token = next(token for token in self.tokens if not 0 <= token < vocab)
        raise BadRequest(f"{where}: token id {token} is outside the vocabulary of {vocab}", param=param)


def as_ids(value: Any) -> Ids | None:
    """A list of whole numbers, not empty; None for anything else. Long ones are common, so that they are not looked at one by
    one."""
    if isinstance(value, Ids):
        return value
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        return None
    try:
        packed = pack_tokens(value)
    except OverflowError:
        return Ids(value, b"", max(value)) if set(map(type, value)) == {int} else None
    except TypeError:
        return None
    ids = np.frombuffer(packed, np.uint32)
    small = np.flatnonzero(ids <= 1)  # true and false are among them
    return Ids(value, packed, int(ids.max())) if all(type(value[at]) is int for at in small.tolist()) else None


def drop_neutral(
    body: dict[str, Any], known: frozenset[str], more: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
) -> dict[str, Any]:
    """Without nulls and without unsupported fields at values that change nothing; others raise Unsupported by name. `more`:
    fields that one endpoint refuses besides, known or not, with their neutral values."""
    kept = {}
    for name, value in body.items():
        if value is not None and name not in UNSUPPORTED and name not in more:  # nearly all
            kept[name] = value
            continue
        if value is None or any(value == v and type(value) is type(v) for v in more.get(name, NEUTRAL.get(name, ()))):
            continue
        if name in more or (name in UNSUPPORTED and name not in known):
            raise Unsupported(f"{name}={_short(value)} is not supported", param=name)
        kept[name] = value
    return kept


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
