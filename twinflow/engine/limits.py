"""What is refused before anything is computed: requests that can never run here. Pure."""

from twinflow.contracts.errors import BadRequest, TooLong
from twinflow.contracts.hashing import HASH_BYTES, TOKEN_BYTES
from twinflow.contracts.requests import GenerateRequest
from twinflow.engine.base import Ready


def check_request(request: GenerateRequest, ready: Ready, *, generates: bool) -> None:
    """Raises BadRequest or TooLong with the numbers. `generates`: the output is computed here too, not only the prompt."""
    if not request.id:
        raise BadRequest("a request needs an id", param="id")
    if len(request.root) != HASH_BYTES:
        raise BadRequest(f"root must be {HASH_BYTES} bytes, got {len(request.root)}", param="root")
    check_tokens("prompt", request.prompt, ready.vocab_size)
    check_tokens("forced", request.forced, ready.vocab_size)
    if not request.prompt:
        raise BadRequest("the prompt is empty", param="prompt")
    sampling = request.sampling
    for name, ids in (("logit_bias", [i for i, _ in sampling.logit_bias]), ("stop_token_ids", sampling.stop_token_ids)):
        for token in ids:
            if not 0 <= token < ready.vocab_size:
                raise BadRequest(
                    f"{name} has token id {token}, the vocabulary ends at {ready.vocab_size - 1}", param=name
                )
    forced_tokens = len(request.forced) // TOKEN_BYTES
    if sampling.max_tokens <= forced_tokens:
        raise BadRequest(
            f"max_tokens={sampling.max_tokens} leaves nothing to generate after {forced_tokens} forced tokens",
            param="max_tokens",
        )
    total = request.max_total_tokens if generates else request.prompt_tokens + forced_tokens
    what = (
        f"{request.prompt_tokens} prompt tokens + max_tokens {sampling.max_tokens}" if generates else f"{total} tokens"
    )
    if total > ready.max_model_tokens:
        raise TooLong(f"{what} exceed the model's limit of {ready.max_model_tokens} tokens", param="max_tokens")
    if total > ready.max_request_tokens:
        size = ready.block_tokens
        raise TooLong(
            f"{what} exceed this worker's cache of {ready.max_request_tokens} tokens: they need {-(-total // size)} blocks "
            f"of {size} tokens and 1 state slot, it has {ready.max_request_tokens // size} blocks",
            param="max_tokens",
        )


def check_tokens(name: str, packed: bytes, vocab_size: int) -> None:
    """Raises BadRequest unless `packed` is whole uint32 ids of the vocabulary."""
    if len(packed) % TOKEN_BYTES:
        raise BadRequest(f"{name} must be packed uint32 token ids, got {len(packed)} bytes", param=name)
    largest = max(memoryview(packed).cast("I"), default=0)
    if largest >= vocab_size:
        raise BadRequest(f"{name} has token id {largest}, the vocabulary ends at {vocab_size - 1}", param=name)
