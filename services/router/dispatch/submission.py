"""What goes to a decode worker."""

from collections.abc import Sequence

from services.router.schedule.base import Choice
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.requests import SamplingParams
from twinflow.rpc import convert
from twinflow.rpc.v1 import engine_pb2 as pb

GATHER_TOKENS = 32  # of a whole answer; so many are computed again, at most, if its worker is lost


def submission(
    id: str,
    idempotency_id: str,
    prompt: bytes,
    root: bytes,
    sampling: SamplingParams,
    choice: Choice,
    sent: Sequence[int] = (),
    at_once: bool = False,
) -> pb.RouterMessage:
    """`id` is the attempt's. `sent`: tokens that the client has from an earlier attempt; they count as generated. `at_once`:
    nobody looks at a part of the reply. Candidates go along with a local choice too: the decode worker's own match decides.

    Made in one piece: protobuf copies each part that is put into another, the prompt too."""
    message = pb.RouterMessage()
    submit = message.submit
    submit.id = id
    submit.prompt = prompt
    convert.sampling_to_pb(sampling, submit.sampling)
    submit.root = root
    if sent:
        submit.forced = pack_tokens(sent)
    for c in choice.candidates:
        submit.candidates.add(
            worker_id=c.record.id,
            incarnation=c.record.incarnation,
            addresses=c.record.addresses,
            predicted_usable_tokens=c.usable_tokens,
        )
    submit.reason = choice.reason.value
    submit.idempotency_id = idempotency_id
    submit.local_max_tokens = choice.local_max_tokens
    if at_once:
        submit.gather_tokens = GATHER_TOKENS
    return message
