"""Whether a hand-off is taken: what can run here, how many at once. Pure."""

from twinflow.contracts.errors import BadRequest, Overloaded
from twinflow.contracts.requests import GenerateRequest
from twinflow.engine.base import Ready
from twinflow.engine.limits import check_request
from twinflow.rpc.convert import request_from_open
from twinflow.rpc.v1 import engine_pb2 as pb


def admit(message: pb.Open, ready: Ready, open_handoffs: int, max_open: int) -> GenerateRequest:
    """The request to compute. Raises BadRequest, TooLong or Overloaded."""
    if open_handoffs >= max_open:
        raise Overloaded(f"{open_handoffs} hand-offs are open here, at most {max_open} are taken")
    request = request_from_open(message)
    check_request(request, ready, generates=False)
    check_have(message.have_tokens, request, ready.block_tokens)
    check_want(message.want_checkpoint_at, request, ready.block_tokens)
    return request


def check_have(have_tokens: int, request: GenerateRequest, block_tokens: int) -> None:
    """Raises BadRequest unless the reader holds whole blocks of this prompt."""
    prompt_tokens = request.prompt_tokens + len(request.forced) // 4
    if have_tokens % block_tokens or have_tokens > prompt_tokens:
        raise BadRequest(
            f"have_tokens={have_tokens} must be a multiple of {block_tokens} up to the {prompt_tokens} prompt tokens",
            param="have_tokens",
        )


def check_want(want_checkpoint_at: int, request: GenerateRequest, block_tokens: int) -> None:
    """Raises BadRequest unless it is 0 or a block boundary inside this prompt."""
    prompt_tokens = request.prompt_tokens + len(request.forced) // 4
    if want_checkpoint_at % block_tokens or want_checkpoint_at >= prompt_tokens:
        raise BadRequest(
            f"want_checkpoint_at={want_checkpoint_at} must be a multiple of {block_tokens} below the {prompt_tokens} prompt"
            " tokens",
            param="want_checkpoint_at",
        )
